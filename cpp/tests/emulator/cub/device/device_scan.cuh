// cub::DeviceScan on the host.
#ifndef SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_
#define SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_

#include "cpp/tests/emulator/cuda_runtime.h"

namespace cub {

struct DeviceScan {
  template <typename In, typename Out>
  static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, In in, Out out, int n,
                                  cudaStream_t) {
    if (scratch == nullptr) {
      bytes = 1;
      return cudaSuccess;
    }
    emulator::num_launches += 2;
    auto sum = *out;
    sum = 0;
    for (int i = 0; i < n; ++i) {
      const auto value = in[i];
      out[i] = sum;
      sum += value;
    }
    return cudaSuccess;
  }
};

}  // namespace cub

#endif  // SOK_TESTS_EMULATOR_CUB_DEVICE_DEVICE_SCAN_CUH_
