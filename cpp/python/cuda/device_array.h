// Arrays in device memory, in and out of Python by `__cuda_array_interface__` (version 3): CuPy,
// PyTorch and Numba arrays come in, and what goes out is a `CudaArray`, which they all take without
// a copy. Nothing here needs any of them.
#ifndef SOK_PYTHON_CUDA_DEVICE_ARRAY_H_
#define SOK_PYTHON_CUDA_DEVICE_ARRAY_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/cuda/device.h"
#include "cpp/python/bind.h"

namespace sok {

// From a `stream=` argument: the address that CuPy's `stream.ptr` or PyTorch's `cuda_stream` gives;
// 0 is the default stream.
cuda::Stream StreamOf(uint64_t address);

// An array that Python owns.
class CudaArray {
 public:
  CudaArray(std::vector<int64_t> shape, std::string type, cuda::Stream stream);
  // A copy of a NumPy array.
  CudaArray(const pybind11::array& host, cuda::Stream stream);

  template <typename T>
  T* as() const {
    return buffer_.as<T>();
  }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::string& type() const { return type_; }
  int64_t size() const;
  void Shorten(int64_t rows) { shape_[0] = rows; }
  pybind11::dict Interface() const;
  pybind11::array Get() const;  // a copy in host memory; waits

 private:
  std::vector<int64_t> shape_;
  std::string type_;  // as in NumPy's interface: "<f4", "<i8", "|b1", ...
  cuda::Stream stream_;
  cuda::Buffer buffer_;
};

// An array that came in. Valid while the Python object lives.
class DeviceView {
 public:
  // Throws ValueError naming `argument` unless `object` is a contiguous device array of one of
  // `types` and of `shape`, where -1 is any length. Work on the array's own stream comes first.
  DeviceView(const pybind11::object& object, const char* argument,
             const std::vector<const char*>& types, const std::vector<int64_t>& shape,
             cuda::Stream stream);

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  int64_t length(int axis = 0) const { return shape_[axis]; }

 private:
  uint64_t address_ = 0;
  std::vector<int64_t> shape_;
};

// Registers `CudaArray`.
void BindDeviceArray(pybind11::module_& m);

}  // namespace sok

#endif  // SOK_PYTHON_CUDA_DEVICE_ARRAY_H_
