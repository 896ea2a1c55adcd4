// `_core.CudaTable`: CudaTable on device arrays, with the methods of `_core.Table`.
//
// Every method takes `stream=` (the address of a CUDA stream, 0 for the default one) and returns
// before the device has done the work, unless it returns something of the host. Results are
// CudaArrays, or the arrays given as `rows=` and `found=`, so that a loop need not allocate.
#include "cpp/python/cuda/bind_cuda.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

namespace py = pybind11;

namespace sok {
namespace {

using cuda::CudaTable;
using cuda::Stream;

std::unique_ptr<CudaTable> MakeCudaTable(
    const std::string& name, int64_t dim, const std::string& key_dtype,
    const std::string& initializer, float a, float b, const py::object& default_rows, uint64_t seed,
    int64_t initial_capacity, int64_t max_capacity, bool use_hashtable, int64_t rank,
    int64_t world_size, double max_load_factor, const py::dict& policy, uint64_t stream) {
  TableOptions options;
  options.name = name;
  options.dim = dim;
  options.key_type = ParseKeyType(key_dtype);
  SetInitializer(initializer, a, b, default_rows, &options);
  options.seed = seed;
  options.initial_capacity = initial_capacity;
  options.max_capacity = max_capacity;
  options.use_hashtable = use_hashtable;
  options.rank = rank;
  options.world_size = world_size;
  options.policy = ParsePolicy(policy);
  if (options.key_type != KeyType::kInt64 && options.key_type != KeyType::kUint64) {
    throw py::value_error(
        "`key_dtype` must be int64 or uint64 for a table in device memory. Received: " + key_dtype +
        " (table '" + name + "')");
  }
  return std::make_unique<CudaTable>(options, max_load_factor, StreamOf(stream));
}

// An output: what the caller gave, checked, or a new array.
struct Output {
  py::object object;
  std::optional<DeviceView> view;  // of what the caller gave
  void* data = nullptr;

  Output(const py::object& given, const char* argument, const char* type,
         const std::vector<int64_t>& shape, Stream stream) {
    if (given.is_none()) {
      auto array = std::make_unique<CudaArray>(shape, type, stream);
      data = array->as<void>();
      object = py::cast(std::move(array));
    } else {
      // A flag may be written to booleans or to bytes.
      std::vector<const char*> types = {type};
      if (std::string(type) == "|b1") types.push_back("|u1");
      view.emplace(given, argument, types, shape, stream);
      data = view->as<void>();
      object = given;
    }
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

py::tuple Find(CudaTable& table, const py::object& keys, const py::object& rows,
               const py::object& found, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const Output out(rows, "rows", "<f4", {key_view.length(), table.dim()}, stream);
  const Output flags(found, "found", "|b1", {key_view.length()}, stream);
  table.Find(stream, key_view.as<uint64_t>(), key_view.length(), out.as<float>(),
             flags.as<uint8_t>());
  return py::make_tuple(out.object, flags.object);
}

py::tuple FindOrInsert(CudaTable& table, const py::object& keys, const py::object& rows,
                       const py::object& inserted, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const Output out(rows, "rows", "<f4", {key_view.length(), table.dim()}, stream);
  const Output flags(inserted, "inserted", "|b1", {key_view.length()}, stream);
  table.FindOrInsert(stream, key_view.as<uint64_t>(), key_view.length(), out.as<float>(),
                     flags.as<uint8_t>());
  return py::make_tuple(out.object, flags.object);
}

py::object RowNumbers(CudaTable& table, const py::object& keys, bool insert, const py::object& out,
                      uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const Output numbers(out, "out", "<u4", {key_view.length()}, stream);
  if (insert) {
    table.FindOrInsertRows(stream, key_view.as<uint64_t>(), key_view.length(),
                           numbers.as<uint32_t>(), nullptr);
  } else {
    table.FindRows(stream, key_view.as<uint64_t>(), key_view.length(), numbers.as<uint32_t>());
  }
  return numbers.object;
}

py::object Gather(CudaTable& table, const py::object& row_numbers, const py::object& rows,
                  uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView numbers(row_numbers, "row_numbers", {"<u4"}, {-1}, stream);
  const Output out(rows, "rows", "<f4", {numbers.length(), table.dim()}, stream);
  table.GatherRows(stream, numbers.as<uint32_t>(), numbers.length(), out.as<float>());
  return out.object;
}

void Assign(CudaTable& table, const py::object& keys, const py::object& rows,
            uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const DeviceView row_view(rows, "rows", {"<f4"}, {key_view.length(), table.dim()}, stream);
  table.Assign(stream, key_view.as<uint64_t>(), key_view.length(), row_view.as<float>());
}

int64_t Erase(CudaTable& table, const py::object& keys, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  return table.Erase(stream, key_view.as<uint64_t>(), key_view.length());
}

// (keys, rows, {slot: rows}) as NumPy arrays, as Table.export gives them.
py::tuple Export(CudaTable& table, bool with_slots, uint64_t stream) {
  std::vector<uint64_t> keys;
  std::vector<float> whole_rows;
  {
    const py::gil_scoped_release release;
    table.Export(StreamOf(stream), &keys, &whole_rows);
  }
  const int64_t num_keys = static_cast<int64_t>(keys.size());
  const int64_t stride = table.row_floats();
  const auto columns = [&](int64_t offset, int64_t width) {
    FloatArray part = NewFloats({num_keys, width});
    for (int64_t i = 0; i < num_keys; ++i) {
      std::copy_n(whole_rows.data() + i * stride + offset, width, part.mutable_data() + i * width);
    }
    return part;
  };
  py::dict slots;
  int64_t offset = table.dim();
  for (const SlotSpec& slot : table.slots()) {
    if (with_slots && slot.saved) slots[py::str(slot.name)] = columns(offset, slot.width);
    offset += slot.width;
  }
  return py::make_tuple(KeysToNumpy(keys.data(), num_keys, table.options().key_type),
                        columns(0, table.dim()), slots);
}

void Import(CudaTable& table, const py::object& key_object, const py::object& row_object,
            const std::optional<py::dict>& slots, uint64_t stream) {
  const KeyArray keys(key_object, table.options().key_type);
  const FloatArray rows = FloatsOfShape(row_object, {keys.size(), table.dim()}, "rows");
  const py::dict given = slots.value_or(py::dict());
  std::vector<SlotSpec> specs = table.slots();
  for (const auto& [name, value] : given) {
    const std::string slot_name = py::cast<std::string>(name);
    const py::array array = py::array::ensure(py::reinterpret_borrow<py::object>(value));
    if (!array || array.ndim() != 2) {
      PyErr_Clear();
      throw py::value_error("Slot variable '" + slot_name + "' must have shape [num_keys, width]");
    }
    const auto present = std::find_if(specs.begin(), specs.end(),
                                      [&](const SlotSpec& slot) { return slot.name == slot_name; });
    if (present == specs.end()) {
      // An initial value of NaN: not known until an optimizer says it.
      specs.push_back({slot_name, array.shape(1), std::numeric_limits<float>::quiet_NaN(), true});
    } else if (array.shape(1) != present->width) {
      throw py::value_error("Import: slot variable '" + slot_name + "' must have width " +
                            std::to_string(present->width) +
                            ". Received: " + std::to_string(array.shape(1)) + " (table '" +
                            table.options().name + "')");
    }
  }
  int64_t stride = table.dim();
  for (const SlotSpec& slot : specs) stride += slot.width;
  std::vector<float> whole_rows(static_cast<size_t>(keys.size() * stride));
  const auto fill = [&](int64_t offset, int64_t width, const float* from, float initial) {
    for (int64_t i = 0; i < keys.size(); ++i) {
      float* const to = whole_rows.data() + i * stride + offset;
      if (from == nullptr) {
        std::fill_n(to, width, initial);
      } else {
        std::copy_n(from + i * width, width, to);
      }
    }
  };
  fill(0, table.dim(), rows.data(), 0.0f);
  int64_t offset = table.dim();
  for (const SlotSpec& slot : specs) {
    if (given.contains(slot.name.c_str())) {
      const FloatArray part =
          FloatsOfShape(given[slot.name.c_str()], {keys.size(), slot.width}, slot.name.c_str());
      fill(offset, slot.width, part.data(), 0.0f);
    } else {
      fill(offset, slot.width, nullptr, slot.initial);
    }
    offset += slot.width;
  }
  const py::gil_scoped_release release;
  table.ConfigureSlots(StreamOf(stream), specs);
  table.Import(StreamOf(stream), keys.data(), keys.size(), whole_rows.data());
}

py::dict Stats(CudaTable& table, uint64_t stream) {
  const cuda::DeviceTableStats stats = table.Stats(StreamOf(stream));
  py::dict out;
  out["size"] = stats.size;
  out["capacity"] = stats.capacity;
  out["max_capacity"] = stats.max_capacity;
  out["num_buckets"] = stats.num_buckets;
  out["load_factor"] = stats.load_factor;
  out["mean_probe_length"] = stats.mean_probe_length;
  out["max_probe_length"] = stats.max_probe_length;
  out["index_bytes"] = stats.index_bytes;
  out["arena_bytes"] = stats.arena_bytes;
  out["bytes"] = stats.bytes;
  return out;
}

}  // namespace

void BindCudaTable(py::module_& m) {
  const auto stream = [] { return py::arg("stream") = 0; };
  py::class_<CudaTable> table(m, "CudaTable", "One rank's shard of a table, in device memory.");
  BindCudaPolicies(table);
  table
      .def(py::init(&MakeCudaTable), py::arg("name"), py::arg("dim"), py::kw_only(),
           py::arg("key_dtype") = "int64", py::arg("initializer") = "uniform",
           py::arg("a") = -0.05f, py::arg("b") = 0.05f, py::arg("default_rows") = py::none(),
           py::arg("seed") = 0, py::arg("initial_capacity") = 0, py::arg("max_capacity") = 0,
           py::arg("use_hashtable") = true, py::arg("rank") = 0, py::arg("world_size") = 1,
           py::arg("max_load_factor") = 0.875, py::arg("policy") = py::dict(), stream())
      .def("find", &Find, py::arg("keys"), py::kw_only(), py::arg("rows") = py::none(),
           py::arg("found") = py::none(), stream())
      .def("find_or_insert", &FindOrInsert, py::arg("keys"), py::kw_only(),
           py::arg("rows") = py::none(), py::arg("inserted") = py::none(), stream())
      .def("row_numbers", &RowNumbers, py::arg("keys"), py::kw_only(), py::arg("insert") = false,
           py::arg("out") = py::none(), stream())
      .def("gather", &Gather, py::arg("row_numbers"), py::kw_only(), py::arg("rows") = py::none(),
           stream())
      .def("assign", &Assign, py::arg("keys"), py::arg("rows"), py::kw_only(), stream())
      .def("erase", &Erase, py::arg("keys"), py::kw_only(), stream())
      .def(
          "clear", [](CudaTable& t, uint64_t s) { t.Clear(StreamOf(s)); }, py::kw_only(), stream())
      .def(
          "reserve",
          [](CudaTable& t, int64_t num_keys, uint64_t s) { t.Reserve(StreamOf(s), num_keys); },
          py::arg("num_keys"), py::kw_only(), stream())
      .def("export", &Export, py::arg("with_slots") = true, py::kw_only(), stream())
      .def("import_", &Import, py::arg("keys"), py::arg("rows"), py::arg("slots") = py::none(),
           py::kw_only(), stream())
      .def("stats", &Stats, py::kw_only(), stream())
      .def(
          "configure_slots",
          [](CudaTable& t, const std::vector<SlotSpec>& specs, uint64_t s) {
            t.ConfigureSlots(StreamOf(s), specs);
          },
          py::arg("specs"), py::kw_only(), stream())
      // Size and capacity wait for all work on the table.
      .def("__len__", [](CudaTable& t) { return t.Stats(t.stream()).size; })
      .def_property_readonly("size", [](CudaTable& t) { return t.Stats(t.stream()).size; })
      .def_property_readonly("capacity", [](CudaTable& t) { return t.Stats(t.stream()).capacity; })
      .def_property_readonly("slots", &CudaTable::slots)
      .def_property_readonly("name", [](const CudaTable& t) { return t.options().name; })
      .def_property_readonly("dim", &CudaTable::dim)
      .def_property_readonly("key_dtype",
                             [](const CudaTable& t) { return KeyTypeName(t.options().key_type); });
}

void BindCuda(py::module_& m) {
  py::register_exception<cuda::CudaError>(m, "CudaError", PyExc_RuntimeError);
  BindDevice(m);
  BindDeviceArray(m);
  BindCudaTable(m);
  BindCudaOps(m);
  BindCudaGroup(m);
}

}  // namespace sok
