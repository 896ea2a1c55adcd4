// Arguments and results of a table's calls other than arrays: snapshots, counts, policies.
#include "cpp/python/table_calls.h"

namespace py = pybind11;

namespace sok {
namespace {

template <typename T>
py::array_t<T> ToNumpy(const std::vector<T>& values, const std::vector<py::ssize_t>& shape) {
  py::array_t<T> array(shape);
  std::copy(values.begin(), values.end(), array.mutable_data());
  return array;
}

}  // namespace

py::tuple SnapshotToTuple(const TableSnapshot& snapshot, const TableOptions& options) {
  const int64_t num_keys = static_cast<int64_t>(snapshot.keys.size());
  const int64_t slot_width = snapshot.slot_width();
  py::dict slots;
  int64_t offset = 0;
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    const int64_t width = snapshot.slot_widths[s];
    FloatArray slot = NewFloats({num_keys, width});
    for (int64_t i = 0; i < num_keys; ++i) {
      std::copy_n(snapshot.slot_rows.data() + i * slot_width + offset, width,
                  slot.mutable_data() + i * width);
    }
    slots[py::str(snapshot.slot_names[s])] = slot;
    offset += width;
  }
  return py::make_tuple(KeysToNumpy(snapshot.keys.data(), num_keys, options.key_type),
                        ToNumpy(snapshot.rows, {num_keys, options.dim}), slots);
}

TableSnapshot SnapshotFrom(const py::object& key_object, const py::object& row_object,
                           const std::optional<py::dict>& slots, const TableOptions& options) {
  const KeyArray keys(key_object, options.key_type);
  const FloatArray rows = FloatsOfShape(row_object, {keys.size(), options.dim}, "rows");
  TableSnapshot snapshot;
  snapshot.keys.assign(keys.data(), keys.data() + keys.size());
  snapshot.rows.assign(rows.data(), rows.data() + rows.size());
  std::vector<FloatArray> arrays;
  for (const auto& [name, value] : slots.value_or(py::dict())) {
    const std::string slot_name = py::cast<std::string>(name);
    const py::array any = py::array::ensure(py::reinterpret_borrow<py::object>(value));
    if (!any || any.ndim() != 2) {
      PyErr_Clear();
      throw py::value_error("Slot variable '" + slot_name + "' must have shape [num_keys, width]");
    }
    arrays.push_back(FloatsOfShape(any, {keys.size(), any.shape(1)}, slot_name.c_str()));
    snapshot.slot_names.push_back(slot_name);
    snapshot.slot_widths.push_back(any.shape(1));
  }
  for (int64_t i = 0; i < keys.size(); ++i) {
    for (const FloatArray& array : arrays) {
      const float* const row = array.data() + i * array.shape(1);
      snapshot.slot_rows.insert(snapshot.slot_rows.end(), row, row + array.shape(1));
    }
  }
  return snapshot;
}

py::dict EvictedToDict(const EvictedRows& popped, const TableOptions& options) {
  const int64_t n = static_cast<int64_t>(popped.keys.size());
  py::dict out;
  out["keys"] = KeysToNumpy(popped.keys.data(), n, options.key_type);
  out["rows"] = ToNumpy(popped.rows, {n, options.dim});
  out["slot_rows"] = ToNumpy(popped.slot_rows, {n, popped.slot_width()});
  out["slot_names"] = popped.slot_names;
  out["frequencies"] = ToNumpy(popped.frequencies, {n});
  out["last_steps"] = ToNumpy(popped.last_steps, {n});
  return out;
}

StorageOptions ParseStorage(const py::dict& fields) {
  StorageOptions storage;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    if (name == "path") {
      storage.path = py::cast<std::string>(value);
    } else if (name == "memory") {
      storage.memory_bytes = py::cast<int64_t>(value);
    } else if (name == "file") {
      storage.file_bytes = py::cast<int64_t>(value);
    } else if (name == "lfu") {
      storage.lfu = py::cast<bool>(value);
    } else {
      throw py::value_error(
          "`storage` must have no other fields than 'path', 'memory', 'file', "
          "'lfu'. Received: '" +
          name + "'");
    }
  }
  return storage;
}

PolicyOptions ParsePolicy(const py::dict& fields) {
  PolicyOptions policy;
  for (const auto& [key, value] : fields) {
    const std::string name = py::cast<std::string>(key);
    if (name == "score") {
      policy.score = ParseScoreKind(py::cast<std::string>(value));
    } else if (!SetField(&policy, name, value)) {
      throw py::value_error("`policy` has no field '" + name + "'");
    }
  }
  return policy;
}

}  // namespace sok
