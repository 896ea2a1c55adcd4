// An array in emulated device memory, as a caller of the backend has it.
#ifndef SOK_TESTS_CUDA_DEVICE_ARRAY_H_
#define SOK_TESTS_CUDA_DEVICE_ARRAY_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/device.h"

namespace sok {

template <typename T>
class DeviceArray {
 public:
  // Filled in on the stream, in whose order it is freed.
  DeviceArray(const std::vector<T>& values, cuda::Stream stream)
      : size_(values.size()), stream_(stream), buffer_((values.size() + 1) * sizeof(T), stream) {
    cuda::CopyToDevice(stream, buffer_.data(), values.data(), values.size() * sizeof(T));
  }
  DeviceArray(size_t count, T fill, cuda::Stream stream)
      : DeviceArray(std::vector<T>(count, fill), stream) {}

  operator T*() const { return buffer_.as<T>(); }  // NOLINT: it is one to the backend
  // Waits for the stream.
  std::vector<T> Get() const {
    std::vector<T> values(size_);
    cuda::CopyToHost(stream_, values.data(), buffer_.data(), size_ * sizeof(T));
    return values;
  }

 private:
  size_t size_;
  cuda::Stream stream_;
  cuda::Buffer buffer_;
};

}  // namespace sok

#endif  // SOK_TESTS_CUDA_DEVICE_ARRAY_H_
