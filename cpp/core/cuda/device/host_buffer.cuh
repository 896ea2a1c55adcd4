// Pinned host memory: the device accesses it directly, in copies without staging in the driver, and
// in kernels.
#ifndef SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_
#define SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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

// Pinned memory for what a call learns from the device, kept for later calls. A copy to memory that
// is not pinned goes through the driver's pinned memory, in a call that blocks. Results of a few KB
// are written here by a kernel: a copy is one launch more, and delays the stream for longer.
class PinnedPiece {
 public:
  explicit PinnedPiece(size_t bytes) {
    if (bytes == 0) return;
    {
      const std::lock_guard<std::mutex> lock(Mutex());
      for (std::unique_ptr<HostBuffer>& free : Free()) {
        if (free->bytes() < bytes) continue;
        std::swap(free, Free().back());
        memory_ = std::move(Free().back());
        Free().pop_back();
        return;
      }
    }
    size_t room = size_t{64} << 10;
    while (room < bytes) room *= 2;
    memory_ = std::make_unique<HostBuffer>(room);
  }
  ~PinnedPiece() {
    if (memory_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(Mutex());
    Free().push_back(std::move(memory_));
  }
  PinnedPiece(const PinnedPiece&) = delete;

  template <typename T>
  T* as() const {  // null for 0 bytes
    return memory_ == nullptr ? nullptr : memory_->as<T>();
  }

 private:
  static std::mutex& Mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<std::unique_ptr<HostBuffer>>& Free() {  // never freed, as the pools
    static auto* const pieces = new std::vector<std::unique_ptr<HostBuffer>>;
    return *pieces;
  }

  std::unique_ptr<HostBuffer> memory_;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_HOST_BUFFER_CUH_
