// cub::DeviceScan on the host.
#ifndef SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_
#define SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_

#include "cpp/tests/emulator/cuda_runtime.h"

namespace cub {

struct DeviceScan {
  template <typename In, typename Out>
  static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, In in, Out out, int n,
                                  cudaStream_t stream) {
    if (scratch == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    const emulator::Lock lock(emulator::device_mutex);
    emulator::num_launches += 1;  // and the one below
    const auto check = [=](bool now) {
      const auto& memory = emulator::DeviceMemory::Get();
      if constexpr (std::is_pointer_v<In>) {
        memory.RequireDevice(in, n * sizeof(*in), now, "ExclusiveSum");
      }
      memory.RequireDevice(out, n * sizeof(*out), now, "ExclusiveSum");
      memory.RequireDevice(scratch, 1, now, "ExclusiveSum");
    };
    check(false);
    emulator::Enqueue(stream, [=] {
      check(true);
      std::decay_t<decltype(*out)> sum = 0;
      for (int i = 0; i < n; ++i) {
        const auto value = in[i];
        out[i] = sum;
        sum += value;
      }
    });
    return cudaSuccess;
  }
};

}  // namespace cub

#endif  // SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_
