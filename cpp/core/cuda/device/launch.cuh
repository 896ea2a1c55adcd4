// Kernel launches, and the few things that all kernels need.
#ifndef SOK_CORE_CUDA_DEVICE_LAUNCH_CUH_
#define SOK_CORE_CUDA_DEVICE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/platform.h"

namespace sok {
namespace cuda {

inline constexpr int kThreads = 256;  // of a block
inline constexpr int kWarp = 32;

// A number of elements of which the host knows only a bound: a kernel is launched for `most` and
// reads `actual` from device memory, so that nothing waits for it.
struct Count {
  int64_t most = 0;
  const uint32_t* actual = nullptr;  // null: exactly `most`

  Count(int64_t count = 0) : most(count) {}  // NOLINT: a plain number is a count
  Count(int64_t bound, const uint32_t* count) : most(bound), actual(count) {}

  SOK_HD int64_t Get() const {
    return actual == nullptr || int64_t{*actual} > most ? most : int64_t{*actual};
  }
};

#ifdef __CUDACC__
#define SOK_DEVICE __device__ __forceinline__
// An array that the threads of a block share, in a kernel.
#define SOK_SHARED(type, name, count) __shared__ type name[count]
#else  // the emulator defines SOK_SHARED
#define SOK_DEVICE inline
#endif

SOK_DEVICE int64_t GlobalThread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x);
}

// Runs `kernel` on at least `num_threads` threads, in whole blocks. For 0 threads it launches
// nothing, since an empty grid is an error in CUDA. Does not synchronise.
template <typename... Parameters, typename... Arguments>
void Launch(void (*kernel)(Parameters...), int64_t num_threads, Stream stream,
            Arguments&&... arguments) {
  if (num_threads <= 0) return;
  const int64_t num_blocks = (num_threads + kThreads - 1) / kThreads;
  if (num_blocks > INT32_MAX) throw CudaError("A batch is too large for one launch");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  CudaCheck(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
            "cudaLaunchKernelEx");
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_LAUNCH_CUH_
