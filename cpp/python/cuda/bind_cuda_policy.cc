// What `_core.CudaTable` can do where it has admission or eviction policies: the methods of
// `_core.Table`, on device arrays. What is one number or a dict comes from the host and waits.
#include <pybind11/stl.h>

#include <memory>

#include "cpp/python/cuda/bind_cuda.h"

namespace py = pybind11;

namespace sok {
namespace {

using cuda::CudaTable;
using cuda::Stream;

void Observe(CudaTable& table, const py::object& keys, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const py::gil_scoped_release release;
  table.Observe(stream, key_view.as<uint64_t>(), key_view.length());
}

int64_t Evict(CudaTable& table, uint64_t stream) {
  const py::gil_scoped_release release;
  return table.Evict(StreamOf(stream));
}

py::dict PopEvicted(CudaTable& table) { return EvictedToDict(table.PopEvicted(), table.options()); }

py::dict Statistics(CudaTable& table, uint64_t stream) {
  PolicyStatistics statistics;
  {
    const py::gil_scoped_release release;
    statistics = table.Statistics(StreamOf(stream));
  }
  return StatisticsToDict(statistics);
}

py::tuple KeyStatistics(CudaTable& table, const py::object& keys, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const std::vector<int64_t> shape = {key_view.length()};
  auto present = std::make_unique<CudaArray>(shape, "|b1", stream);
  auto frequencies = std::make_unique<CudaArray>(shape, "<i8", stream);
  auto last_steps = std::make_unique<CudaArray>(shape, "<i8", stream);
  table.KeyStatistics(stream, key_view.as<uint64_t>(), key_view.length(), present->as<uint8_t>(),
                      frequencies->as<int64_t>(), last_steps->as<int64_t>());
  return py::make_tuple(std::move(present), std::move(frequencies), std::move(last_steps));
}

int64_t AssignScores(CudaTable& table, const py::object& keys, const py::object& scores,
                     uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const DeviceView score_view(scores, "scores", {"<i8"}, {key_view.length()}, stream);
  const py::gil_scoped_release release;
  return table.AssignScores(stream, key_view.as<uint64_t>(), key_view.length(),
                            score_view.as<int64_t>());
}

}  // namespace

void BindCudaPolicies(py::class_<CudaTable>& table) {
  const auto stream = [] { return py::arg("stream") = 0; };
  table.def("observe", &Observe, py::arg("keys"), py::kw_only(), stream())
      .def("evict", &Evict, py::kw_only(), stream())
      .def("pop_evicted", &PopEvicted)
      .def("statistics", &Statistics, py::kw_only(), stream())
      .def("key_statistics", &KeyStatistics, py::arg("keys"), py::kw_only(), stream())
      .def("assign_scores", &AssignScores, py::arg("keys"), py::arg("scores"), py::kw_only(),
           stream())
      .def("set_step", &CudaTable::SetStep, py::arg("step"))
      .def_property_readonly("keeps_records", &CudaTable::keeps_records);
}

}  // namespace sok
