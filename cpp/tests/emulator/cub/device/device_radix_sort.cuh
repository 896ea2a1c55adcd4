// cub::DeviceRadixSort on the host: stable, and by the given bits only.
#ifndef SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
#define SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_

#include <numeric>

#include "cpp/tests/emulator/cuda_runtime.h"

namespace cub {

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys_in, Key* keys_out,
                               const Value* values_in, Value* values_out, int n, int begin_bit,
                               int end_bit, cudaStream_t stream) {
    if (scratch == nullptr) {
      bytes = static_cast<size_t>(n) * (sizeof(Key) + sizeof(Value));  // as CUB, or a little more
      return cudaSuccess;
    }
    const emulator::Lock lock(emulator::device_mutex);
    // CUB 3.0 on sm_80 and later: one kernel for as many pairs as a block sorts; else two fills, a
    // histogram, a scan, and a fill and a kernel per 8 bits. One of them is counted below.
    const int in_one_block = 256 * (sizeof(Key) == 4 ? 19 : 9);
    if (n > in_one_block) emulator::num_launches += 3 + (end_bit - begin_bit + 7) / 8 * 2;
    const size_t given = bytes;
    const auto check = [=](bool now) {
      const auto& memory = emulator::DeviceMemory::Get();
      for (const void* keys :
           {static_cast<const void*>(keys_in), static_cast<const void*>(keys_out)}) {
        memory.RequireDevice(keys, n * sizeof(Key), now, "SortPairs");
      }
      for (const void* values :
           {static_cast<const void*>(values_in), static_cast<const void*>(values_out)}) {
        memory.RequireDevice(values, n * sizeof(Value), now, "SortPairs");
      }
      memory.RequireDevice(scratch, given, now, "SortPairs");
    };
    check(false);
    emulator::Enqueue(stream, [=] {
      check(true);
      std::memset(scratch, 0xA5, given);
      const auto digit = [=](Key key) {
        const uint64_t up_to_end = end_bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << end_bit) - 1;
        return (static_cast<uint64_t>(key) & up_to_end) >> begin_bit;
      };
      std::vector<int> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return digit(keys_in[a]) < digit(keys_in[b]); });
      for (int i = 0; i < n; ++i) {
        keys_out[i] = keys_in[order[i]];
        values_out[i] = values_in[order[i]];
      }
    });
    return cudaSuccess;
  }
};

}  // namespace cub

#endif  // SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_RADIX_SORT_CUH_
