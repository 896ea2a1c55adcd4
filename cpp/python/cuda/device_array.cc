#include "cpp/python/cuda/device_array.h"

#include <pybind11/stl.h>

#include <algorithm>

namespace py = pybind11;

namespace sok {
namespace {

int64_t ItemBytes(const std::string& type) { return std::stoi(type.substr(2)); }

size_t BytesOf(const std::vector<int64_t>& shape, const std::string& type) {
  size_t bytes = static_cast<size_t>(ItemBytes(type));
  for (int64_t n : shape) bytes *= static_cast<size_t>(n);
  return bytes;
}

std::string Text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + (n < 0 ? "?" : std::to_string(n));
  return "[" + text + "]";
}

}  // namespace

cuda::Stream StreamOf(uint64_t address) { return reinterpret_cast<cuda::Stream>(address); }

CudaArray::CudaArray(std::vector<int64_t> shape, std::string type, cuda::Stream stream)
    : shape_(std::move(shape)), type_(std::move(type)), stream_(stream) {
  cuda::RequireDevice();
  buffer_ = std::make_shared<cuda::Buffer>(BytesOf(shape_, type_), stream);
}

CudaArray::CudaArray(const py::array& host, cuda::Stream stream)
    : CudaArray(std::vector<int64_t>(host.shape(), host.shape() + host.ndim()),
                host.dtype().attr("str").cast<std::string>(), stream) {
  const py::array contiguous = py::array::ensure(host, py::array::c_style);
  cuda::CopyToDevice(stream, buffer_->data(), contiguous.data(), buffer_->bytes());
}

py::dict CudaArray::Interface() const {
  py::dict interface;
  interface["shape"] = py::tuple(py::cast(shape_));
  interface["typestr"] = type_;
  interface["data"] = py::make_tuple(reinterpret_cast<uint64_t>(buffer_->data()), false);
  interface["version"] = 3;
  interface["strides"] = py::none();
  // The protocol writes the default stream as 1.
  interface["stream"] = stream_ == nullptr ? 1 : reinterpret_cast<uint64_t>(stream_);
  return interface;
}

py::array CudaArray::Get() const {
  py::array host(py::dtype(type_), std::vector<py::ssize_t>(shape_.begin(), shape_.end()));
  void* const data = host.mutable_data();
  const py::gil_scoped_release release;
  cuda::CopyToHost(stream_, data, buffer_->data(), BytesOf(shape_, type_));
  return host;
}

py::capsule CudaArray::Dlpack(std::optional<int64_t> stream,
                              const std::optional<std::pair<int32_t, int32_t>>& device,
                              std::optional<bool> copy) const {
  if (device.has_value() && *device != DlpackDevice()) {
    throw py::buffer_error(
        "A CudaArray can be shared only on its own device. Received: dl_device=(" +
        std::to_string(device->first) + ", " + std::to_string(device->second) + ")");
  }
  if (copy.value_or(false)) {
    throw py::buffer_error("A CudaArray can be shared only without a copy. Received: copy=True");
  }
  // The array API: None or 1 is the default stream, 2 the thread's, and 0 is not allowed.
  const int64_t consumer = stream.value_or(1);
  if (consumer == 0 || consumer < -1) {
    throw py::value_error(
        "`stream` must be None, -1, or the address of a stream, 1 for the default "
        "one. Received: " +
        std::to_string(consumer));
  }
  // A consumer that names no stream is taken to work on the default one, which waits for others.
  const cuda::Stream used_on =
      consumer == 1 || consumer == -1 ? nullptr : StreamOf(static_cast<uint64_t>(consumer));
  if (consumer != -1) cuda::OrderAfter(used_on, stream_);
  return dlpack::ToDlpack(buffer_, shape_, type_, used_on);
}

namespace {

dlpack::Incoming FromInterface(const py::object& object, cuda::Stream stream) {
  const py::dict interface = object.attr("__cuda_array_interface__");
  dlpack::Incoming array;
  array.shape = interface["shape"].cast<std::vector<int64_t>>();
  array.type = interface["typestr"].cast<std::string>();
  if (interface.contains("strides") && !interface["strides"].is_none()) {
    const auto strides = interface["strides"].cast<std::vector<int64_t>>();
    array.contiguous = dlpack::IsContiguous(array.shape, strides.data(), ItemBytes(array.type));
  }
  array.address = interface["data"].cast<py::tuple>()[0].cast<uint64_t>();
  if (interface.contains("stream") && !interface["stream"].is_none()) {
    const uint64_t producer = interface["stream"].cast<uint64_t>();
    // 1 and 2 are CUDA's handles of the two default streams; ours writes the first as null.
    cuda::OrderAfter(stream, producer == 1 ? nullptr : StreamOf(producer));
  }
  return array;
}

dlpack::Incoming ArrayOf(const py::object& object, const std::string& name, cuda::Stream stream) {
  if (py::isinstance<CudaArray>(object)) {
    const auto& own = object.cast<const CudaArray&>();
    cuda::OrderAfter(stream, own.stream());
    return {reinterpret_cast<uint64_t>(own.as<void>()), own.shape(), own.type(), true, nullptr};
  }
  if (py::hasattr(object, "__dlpack__") && py::hasattr(object, "__dlpack_device__")) {
    return dlpack::FromDlpack(object, name, stream);
  }
  if (py::hasattr(object, "__cuda_array_interface__")) return FromInterface(object, stream);
  throw py::value_error(name +
                        " must be an array in device memory (with __dlpack__ or "
                        "__cuda_array_interface__, as CuPy's or _core.CudaArray). Received: " +
                        std::string(py::str(py::type::of(object))));
}

}  // namespace

DeviceView::DeviceView(const py::object& object, const char* argument,
                       const std::vector<const char*>& types, const std::vector<int64_t>& shape,
                       cuda::Stream stream) {
  const std::string name = "`" + std::string(argument) + "`";
  array_ = ArrayOf(object, name, stream);
  const auto is_type = [&](const char* allowed) { return array_.type == allowed; };
  if (std::none_of(types.begin(), types.end(), is_type)) {
    std::string wanted;
    for (const char* allowed : types)
      wanted += (wanted.empty() ? "" : " or ") + std::string(allowed);
    throw py::value_error(name + " must have the type " + wanted + ". Received: " + array_.type);
  }
  bool fits = shape.size() == array_.shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || shape[i] == array_.shape[i];
  }
  if (!fits) {
    throw py::value_error(name + " must have shape " + Text(shape) +
                          ". Received: " + Text(array_.shape));
  }
  if (!array_.contiguous) throw py::value_error(name + " must be contiguous in row-major order");
}

void BindDeviceArray(py::module_& m) {
  py::class_<CudaArray>(m, "CudaArray", "An array in device memory; CuPy and PyTorch can share it.")
      .def(py::init([](const py::array& host, uint64_t stream) {
             return CudaArray(host, StreamOf(stream));
           }),
           py::arg("array"), py::kw_only(), py::arg("stream") = 0)
      .def_property_readonly("__cuda_array_interface__", &CudaArray::Interface)
      .def(
          "__dlpack__",
          [](const CudaArray& a, std::optional<int64_t> stream, const py::object& /*max_version*/,
             const std::optional<std::pair<int32_t, int32_t>>& device,
             std::optional<bool> copy) { return a.Dlpack(stream, device, copy); },
          py::kw_only(), py::arg("stream") = py::none(), py::arg("max_version") = py::none(),
          py::arg("dl_device") = py::none(), py::arg("copy") = py::none(),
          "A capsule for `from_dlpack`. Freed in the order of the stream that it was made on.")
      .def("__dlpack_device__", &CudaArray::DlpackDevice, "(2 for CUDA, number of the device).")
      .def_property_readonly("shape",
                             [](const CudaArray& a) { return py::tuple(py::cast(a.shape())); })
      .def_property_readonly("dtype", [](const CudaArray& a) { return py::dtype(a.type()); })
      .def("__len__", [](const CudaArray& a) { return a.shape().empty() ? 0 : a.shape()[0]; })
      .def("get", &CudaArray::Get, "A copy as a NumPy array. Waits for the stream.");
}

}  // namespace sok
