// Arrays in device memory, in and out of Python by DLPack (dlpack.h) or `__cuda_array_interface__`
// (version 3). CuPy, PyTorch, JAX and Numba arrays come in. A `CudaArray` goes out, which all of
// them take without a copy. Nothing here needs these libraries. An array with both interfaces comes
// in by DLPack: there its library orders its own work before ours, while PyTorch's
// `__cuda_array_interface__` names no stream.
#ifndef SOK_PYTHON_CUDA_DEVICE_ARRAY_H_
#define SOK_PYTHON_CUDA_DEVICE_ARRAY_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/python/bind.h"
#include "cpp/python/cuda/dlpack.h"

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
    return buffer_->as<T>();
  }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::string& type() const { return type_; }
  void Shorten(int64_t rows) { shape_[0] = rows; }
  cuda::Stream stream() const { return stream_; }
  pybind11::dict Interface() const;
  // As in the array API. `stream`: the consumer's; its later work is ordered after the work on this
  // array so far. -1: no ordering. Throws BufferError if a copy would be needed.
  pybind11::capsule Dlpack(std::optional<int64_t> stream,
                           const std::optional<std::pair<int32_t, int32_t>>& device,
                           std::optional<bool> copy) const;
  std::pair<int32_t, int32_t> DlpackDevice() const { return {dlpack::kCuda, buffer_->device()}; }
  pybind11::array Get() const;  // a copy in host memory; waits

 private:
  std::vector<int64_t> shape_;
  std::string type_;  // as in NumPy's interface: "<f4", "<i8", "|b1", ...
  cuda::Stream stream_;
  std::shared_ptr<cuda::Buffer> buffer_;  // shared with consumers by DLPack
};

// An array that came in. Valid while this and the Python object live.
class DeviceView {
 public:
  // Throws ValueError naming `argument` unless `object` is a contiguous device array of one of
  // `types` and of `shape`, where -1 is any length. Work on the array's own stream comes first.
  DeviceView(const pybind11::object& object, const char* argument,
             const std::vector<const char*>& types, const std::vector<int64_t>& shape,
             cuda::Stream stream);

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(array_.address);
  }
  int64_t length(int axis = 0) const { return array_.shape[axis]; }
  const std::string& type() const { return array_.type; }

 private:
  dlpack::Incoming array_;
};

// Registers `CudaArray`.
void BindDeviceArray(pybind11::module_& m);

}  // namespace sok

#endif  // SOK_PYTHON_CUDA_DEVICE_ARRAY_H_
