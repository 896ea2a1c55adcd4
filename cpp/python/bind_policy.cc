// What `_core.Table` can do where it has admission or eviction policies.
#include <pybind11/stl.h>

#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

using LongArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

LongArray Longs(const std::vector<int64_t>& values) {
  LongArray array(static_cast<py::ssize_t>(values.size()));
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

FloatArray Floats(const std::vector<float>& values, int64_t num_keys, int64_t width) {
  FloatArray array = NewFloats({num_keys, width});
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

void Observe(CpuTable& table, const py::object& key_object) {
  const KeyArray keys(key_object, table.options().key_type);
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  table.Observe(*pool, keys.data(), keys.size());
}

int64_t Evict(CpuTable& table) {
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  return table.Evict(*pool);
}

py::dict PopEvicted(CpuTable& table) {
  EvictedRows popped;
  {
    const py::gil_scoped_release release;
    popped = table.PopEvicted();
  }
  return EvictedToDict(popped, table.options());
}

py::dict Statistics(const CpuTable& table) {
  PolicyStatistics s;
  {
    const py::gil_scoped_release release;
    s = table.Statistics();
  }
  return StatisticsToDict(s);
}

py::tuple KeyStatistics(const CpuTable& table, const py::object& key_object) {
  const KeyArray keys(key_object, table.options().key_type);
  BoolArray present(keys.size());
  LongArray frequencies(keys.size()), last_steps(keys.size());
  uint8_t* const present_data = reinterpret_cast<uint8_t*>(present.mutable_data());
  int64_t* const frequency_data = frequencies.mutable_data();
  int64_t* const step_data = last_steps.mutable_data();
  {
    const py::gil_scoped_release release;
    table.KeyStatistics(keys.data(), keys.size(), present_data, frequency_data, step_data);
  }
  return py::make_tuple(present, frequencies, last_steps);
}

int64_t AssignScores(CpuTable& table, const py::object& key_object, const LongArray& scores) {
  const KeyArray keys(key_object, table.options().key_type);
  if (scores.ndim() != 1 || scores.size() != keys.size()) {
    throw py::value_error("`scores` must hold " + std::to_string(keys.size()) +
                          " values, one a key. Received: " + std::to_string(scores.size()));
  }
  const py::gil_scoped_release release;
  return table.AssignScores(keys.data(), keys.size(), scores.data());
}

}  // namespace

py::dict EvictedToDict(const EvictedRows& popped, const TableOptions& options) {
  const int64_t n = static_cast<int64_t>(popped.keys.size());
  int64_t slot_width = 0;
  for (int64_t width : popped.slot_widths) slot_width += width;
  py::dict out;
  out["keys"] = KeysToNumpy(popped.keys.data(), n, options.key_type);
  out["rows"] = Floats(popped.rows, n, options.dim);
  out["slot_rows"] = Floats(popped.slot_rows, n, slot_width);
  out["slot_names"] = popped.slot_names;
  out["frequencies"] = Longs(popped.frequencies);
  out["last_steps"] = Longs(popped.last_steps);
  return out;
}

py::dict StatisticsToDict(const PolicyStatistics& s) {
  py::dict out;
  out["size"] = s.size;
  out["seen"] = s.seen;
  out["found"] = s.found;
  out["admitted"] = s.admitted;
  out["refused"] = s.refused;
  out["written"] = s.written;
  out["erased"] = s.erased;
  out["evicted"] = s.evicted;
  out["popped"] = s.popped;
  out["buffered"] = s.buffered;
  out["dropped"] = s.dropped;
  out["waiting"] = s.waiting;
  out["dropped_gradients"] = s.dropped_gradients;
  out["step"] = s.step;
  return out;
}

PolicyOptions ParsePolicy(const py::dict& fields) {
  PolicyOptions policy;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    if (name == "record") {
      policy.record = py::cast<bool>(value);
    } else if (name == "filter_freq") {
      policy.filter_freq = py::cast<int64_t>(value);
    } else if (name == "bloom_max_keys") {
      policy.bloom_max_keys = py::cast<int64_t>(value);
    } else if (name == "bloom_probability") {
      policy.bloom_probability = py::cast<double>(value);
    } else if (name == "bloom_counter_bits") {
      policy.bloom_counter_bits = py::cast<int64_t>(value);
    } else if (name == "no_permission") {
      policy.no_permission = py::cast<float>(value);
    } else if (name == "steps_to_live") {
      policy.steps_to_live = py::cast<int64_t>(value);
    } else if (name == "l2_threshold") {
      policy.l2_threshold = py::cast<float>(value);
    } else if (name == "score") {
      policy.score = ParseScoreKind(py::cast<std::string>(value));
    } else if (name == "evicted_buffer") {
      policy.evicted_buffer = py::cast<int64_t>(value);
    } else {
      throw py::value_error("`policy` has no field '" + name + "'");
    }
  }
  return policy;
}

void BindPolicies(py::class_<CpuTable, std::shared_ptr<CpuTable>>& table) {
  table.def("observe", &Observe, py::arg("keys"))
      .def("evict", &Evict)
      .def("pop_evicted", &PopEvicted)
      .def("statistics", &Statistics)
      .def("key_statistics", &KeyStatistics, py::arg("keys"))
      .def("assign_scores", &AssignScores, py::arg("keys"), py::arg("scores"))
      .def("set_step", &CpuTable::SetStep, py::arg("step"),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("keeps_records", &CpuTable::keeps_records);
}

}  // namespace sok
