// Pinned host memory for the pieces of a large copy: the device accesses it directly, without a
// staging copy in the driver.
#ifndef SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_
#define SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

class HostBuffer {
 public:
  explicit HostBuffer(size_t bytes) : bytes_(bytes), device_(CurrentDevice()) {
    if (bytes > 0) CudaCheck(cudaMallocHost(&data_, bytes), "cudaMallocHost");
  }
  ~HostBuffer() {
    if (data_ != nullptr) OnDevice(device_, [this] { cudaFreeHost(data_); });
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  int device_ = 0;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_
