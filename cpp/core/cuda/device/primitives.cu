#include <cuda_runtime.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/device/primitives.h"

namespace sok {
namespace cuda {
namespace {

int Checked(int64_t count) {
  if (count < 0 || count > INT32_MAX) {
    throw std::invalid_argument("A batch must have between 0 and 2^31 - 1 elements. Received: " +
                                std::to_string(count));
  }
  return static_cast<int>(count);
}

template <typename Key>
void Sort(Stream stream, Workspace& workspace, const Key* keys, Key* sorted_keys,
          const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  const int n = Checked(count);
  if (n == 0) return;
  size_t bytes = 0;
  CudaCheck(cub::DeviceRadixSort::SortPairs(static_cast<void*>(nullptr), bytes, keys, sorted_keys,
                                            values, sorted_values, n, 0, num_bits, stream),
            "DeviceRadixSort");
  void* const scratch = workspace.Take<char>(static_cast<int64_t>(bytes));
  CudaCheck(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values,
                                            sorted_values, n, 0, num_bits, stream),
            "DeviceRadixSort");
}

}  // namespace

int BitsBelow(int64_t end) {
  int bits = 1;
  while (bits < 63 && (int64_t{1} << bits) < end) ++bits;
  return bits;
}

void ExclusiveSum(Stream stream, Workspace& workspace, uint32_t* values, int64_t count) {
  const int n = Checked(count);
  if (n == 0) return;
  size_t bytes = 0;
  CudaCheck(
      cub::DeviceScan::ExclusiveSum(static_cast<void*>(nullptr), bytes, values, values, n, stream),
      "DeviceScan");
  void* const scratch = workspace.Take<char>(static_cast<int64_t>(bytes));
  CudaCheck(cub::DeviceScan::ExclusiveSum(scratch, bytes, values, values, n, stream), "DeviceScan");
}

void SortPairs(Stream stream, Workspace& workspace, const uint32_t* keys, uint32_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  Sort(stream, workspace, keys, sorted_keys, values, sorted_values, count, num_bits);
}

void SortPairs(Stream stream, Workspace& workspace, const uint64_t* keys, uint64_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  Sort(stream, workspace, keys, sorted_keys, values, sorted_values, count, num_bits);
}

}  // namespace cuda
}  // namespace sok
