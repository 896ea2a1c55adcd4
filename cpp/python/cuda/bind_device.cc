// The device itself: what it is, waiting for it, timing, and its memory as a whole.
#include <pybind11/stl.h>

#include "cpp/python/cuda/bind_cuda.h"

namespace py = pybind11;

namespace sok {

using cuda::Stream;
using cuda::TimedEvent;

void BindDevice(py::module_& m) {
  m.def("cuda_device_count", &cuda::DeviceCount, "0 where there is no device or no driver.");
  m.def(
      "cuda_synchronize",
      [](uint64_t stream) {
        const py::gil_scoped_release release;
        cuda::Synchronize(StreamOf(stream));
      },
      py::kw_only(), py::arg("stream") = 0, "Waits for all work on the stream.");
  m.def(
      "cuda_copy",
      [](const py::object& to, const py::object& from, uint64_t address) {
        const Stream stream = StreamOf(address);
        const DeviceView source(from, "from", {"<f4"}, {-1}, stream);
        const DeviceView target(to, "to", {"<f4"}, {source.length()}, stream);
        cuda::CopyOnDevice(stream, target.as<void>(), source.as<void>(),
                           static_cast<size_t>(source.length()) * sizeof(float));
      },
      py::arg("to"), py::arg("from_"), py::kw_only(), py::arg("stream") = 0,
      "Copies floats on the device: what its memory bandwidth is measured with.");
  m.def(
      "cuda_release_memory",
      [] {
        const py::gil_scoped_release release;
        cuda::ReleaseMemory();
      },
      "Gives device memory that is kept for later use back. Waits for the device.");
  m.def(
      "cuda_device_info",
      [] {
        cuda::RequireDevice();
        const cuda::DeviceInfo info = cuda::CurrentDeviceInfo();
        py::dict out;
        out["name"] = info.name;
        out["bytes"] = info.bytes;
        out["free_bytes"] = info.free_bytes;
        out["l2_bytes"] = info.l2_bytes;
        out["num_multiprocessors"] = info.num_multiprocessors;
        out["driver"] = info.driver;
        out["runtime"] = info.runtime;
        return out;
      },
      "The current device; versions of CUDA as 1000 * major + 10 * minor.");
  py::class_<TimedEvent>(m, "CudaEvent", "A point of a stream's work, for timing.")
      .def(py::init<>())
      .def(
          "record", [](TimedEvent& event, uint64_t stream) { event.Record(StreamOf(stream)); },
          py::kw_only(), py::arg("stream") = 0)
      .def("seconds_since", &TimedEvent::SecondsSince, py::arg("earlier"),
           py::call_guard<py::gil_scoped_release>(),
           "Time on the device from `earlier` to here. Waits for both.");
}

}  // namespace sok
