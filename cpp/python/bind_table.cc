// `_core.Table`: CpuTable on NumPy arrays. Locks and threads are the core's; the interpreter's lock
// is released around every core call, so Python threads may share a table.
#include <pybind11/stl.h>

#include <mutex>
#include <optional>
#include <shared_mutex>

#include "cpp/core/cpu/table.h"
#include "cpp/core/hash.h"
#include "cpp/core/philox.h"
#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

std::shared_ptr<CpuTable> MakeTable(const std::string& name, int64_t dim,
                                    const std::string& key_dtype, const std::string& initializer,
                                    float a, float b, const py::object& default_rows, uint64_t seed,
                                    int64_t initial_capacity, int64_t max_capacity,
                                    bool use_hashtable, int64_t rank, int64_t world_size,
                                    const py::dict& policy) {
  TableOptions options;
  options.name = name;
  options.dim = dim;
  options.key_type = ParseKeyType(key_dtype);
  SetInitializer(initializer, a, b, default_rows, &options);
  options.seed = seed;
  options.initial_capacity = initial_capacity;
  options.max_capacity = max_capacity;
  options.policy = ParsePolicy(policy);
  options.use_hashtable = use_hashtable;
  options.rank = rank;
  options.world_size = world_size;
  return std::make_shared<CpuTable>(options);
}

KeyArray Keys(const CpuTable& table, const py::object& keys) {
  return KeyArray(keys, table.options().key_type);
}

py::tuple Find(const CpuTable& table, const py::object& key_object) {
  const KeyArray keys = Keys(table, key_object);
  FloatArray rows = NewFloats({keys.size(), table.dim()});
  BoolArray found(keys.size());
  float* const row_data = rows.mutable_data();
  uint8_t* const found_data = reinterpret_cast<uint8_t*>(found.mutable_data());
  const auto pool = SharedPool();
  {
    const py::gil_scoped_release release;
    table.Find(*pool, keys.data(), keys.size(), row_data, found_data);
  }
  return py::make_tuple(rows, found);
}

py::tuple FindOrInsert(CpuTable& table, const py::object& key_object) {
  const KeyArray keys = Keys(table, key_object);
  FloatArray rows = NewFloats({keys.size(), table.dim()});
  BoolArray inserted(keys.size());
  float* const row_data = rows.mutable_data();
  uint8_t* const inserted_data = reinterpret_cast<uint8_t*>(inserted.mutable_data());
  const auto pool = SharedPool();
  {
    const py::gil_scoped_release release;
    table.FindOrInsert(*pool, keys.data(), keys.size(), row_data, inserted_data);
  }
  return py::make_tuple(rows, inserted);
}

void Assign(CpuTable& table, const py::object& key_object, const py::object& row_object) {
  const KeyArray keys = Keys(table, key_object);
  const FloatArray rows = FloatsOfShape(row_object, {keys.size(), table.dim()}, "rows");
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  table.Assign(*pool, keys.data(), keys.size(), rows.data());
}

int64_t Erase(CpuTable& table, const py::object& key_object) {
  const KeyArray keys = Keys(table, key_object);
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  return table.Erase(*pool, keys.data(), keys.size());
}

py::tuple Export(CpuTable& table, bool with_slots) {
  TableSnapshot snapshot;
  const auto pool = SharedPool();
  {
    const py::gil_scoped_release release;
    snapshot = table.Export(*pool, with_slots);
  }
  const int64_t num_keys = static_cast<int64_t>(snapshot.keys.size());
  FloatArray rows = NewFloats({num_keys, table.dim()});
  std::copy(snapshot.rows.begin(), snapshot.rows.end(), rows.mutable_data());
  py::dict slots;
  int64_t total_width = 0;
  for (int64_t width : snapshot.slot_widths) total_width += width;
  int64_t offset = 0;
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    const int64_t width = snapshot.slot_widths[s];
    FloatArray slot = NewFloats({num_keys, width});
    for (int64_t i = 0; i < num_keys; ++i) {
      std::copy_n(snapshot.slot_rows.data() + i * total_width + offset, width,
                  slot.mutable_data() + i * width);
    }
    slots[py::str(snapshot.slot_names[s])] = slot;
    offset += width;
  }
  return py::make_tuple(KeysToNumpy(snapshot.keys.data(), num_keys, table.options().key_type), rows,
                        slots);
}

void Import(CpuTable& table, const py::object& key_object, const py::object& row_object,
            const std::optional<py::dict>& slots) {
  const KeyArray keys = Keys(table, key_object);
  const FloatArray rows = FloatsOfShape(row_object, {keys.size(), table.dim()}, "rows");
  TableSnapshot snapshot;
  snapshot.keys.assign(keys.data(), keys.data() + keys.size());
  snapshot.rows.assign(rows.data(), rows.data() + rows.size());
  std::vector<FloatArray> arrays;
  int64_t total_width = 0;
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
    total_width += any.shape(1);
  }
  snapshot.slot_rows.resize(static_cast<size_t>(keys.size() * total_width));
  int64_t offset = 0;
  for (const FloatArray& array : arrays) {
    const int64_t width = array.shape(1);
    for (int64_t i = 0; i < keys.size(); ++i) {
      std::copy_n(array.data() + i * width, width,
                  snapshot.slot_rows.data() + i * total_width + offset);
    }
    offset += width;
  }
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  table.Import(*pool, snapshot);
}

FloatArray InitialRows(const CpuTable& table, const py::object& key_object) {
  const KeyArray keys = Keys(table, key_object);
  FloatArray rows = NewFloats({keys.size(), table.dim()});
  float* const row_data = rows.mutable_data();
  const py::gil_scoped_release release;
  const std::shared_lock<std::shared_mutex> lock(table.mutex());
  for (int64_t i = 0; i < keys.size(); ++i) {
    table.InitialRow(keys.data()[i], row_data + i * table.dim());
  }
  return rows;
}

py::dict Stats(const CpuTable& table) {
  TableStats stats;
  {
    const py::gil_scoped_release release;
    stats = table.Stats();
  }
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

std::vector<SlotSpec> Slots(const CpuTable& table) {
  const py::gil_scoped_release release;
  const std::shared_lock<std::shared_mutex> lock(table.mutex());
  return table.slots();
}

void ConfigureSlots(CpuTable& table, const std::vector<SlotSpec>& specs) {
  const auto pool = SharedPool();
  const py::gil_scoped_release release;
  const std::unique_lock<std::shared_mutex> lock(table.mutex());
  table.ConfigureSlots(*pool, specs);
}

// (shard, bucket bits, digest) of a key, for tests that need keys which collide.
py::tuple HashPieces(int64_t key) {
  const uint64_t hash = HashKey(static_cast<uint64_t>(key));
  return py::make_tuple(HashShard(hash), HashBucket(hash), HashDigest(hash));
}

std::vector<uint32_t> PhiloxWords(const std::array<uint32_t, 4>& counter,
                                  const std::array<uint32_t, 2>& key) {
  const PhiloxBlock block =
      Philox(PhiloxBlock{{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  return {block.x, block.x + 4};
}

}  // namespace

void SetInitializer(const std::string& initializer, float a, float b,
                    const py::object& default_rows, TableOptions* options) {
  options->initializer.kind = ParseInitializerKind(initializer);
  options->initializer.a = a;
  options->initializer.b = b;
  if (!default_rows.is_none()) {
    const py::array any = py::array::ensure(default_rows);
    if (!any || any.ndim() != 2) {
      PyErr_Clear();
      throw py::value_error("`default_rows` must have shape [num_default_rows, " +
                            std::to_string(options->dim) + "] (table '" + options->name + "')");
    }
    const FloatArray rows = FloatsOfShape(any, {any.shape(0), options->dim}, "default_rows");
    options->initializer.default_rows.assign(rows.data(), rows.data() + rows.size());
  }
}

void BindTable(py::module_& m) {
  py::class_<SlotSpec>(m, "SlotSpec", "A slot variable: a name and `width` floats behind each row.")
      .def(py::init([](const std::string& name, int64_t width, float initial, bool saved) {
             return SlotSpec{name, width, initial, saved};
           }),
           py::arg("name"), py::arg("width"), py::kw_only(), py::arg("initial") = 0.0f,
           py::arg("saved") = true)
      .def_readonly("name", &SlotSpec::name)
      .def_readonly("width", &SlotSpec::width)
      .def_readonly("initial", &SlotSpec::initial)
      .def_readonly("saved", &SlotSpec::saved);

  py::class_<CpuTable, std::shared_ptr<CpuTable>> table(m, "Table", "One rank's shard of a table.");
  table
      .def(py::init(&MakeTable), py::arg("name"), py::arg("dim"), py::kw_only(),
           py::arg("key_dtype") = "int64", py::arg("initializer") = "uniform",
           py::arg("a") = -0.05f, py::arg("b") = 0.05f, py::arg("default_rows") = py::none(),
           py::arg("seed") = 0, py::arg("initial_capacity") = 0, py::arg("max_capacity") = 0,
           py::arg("use_hashtable") = true, py::arg("rank") = 0, py::arg("world_size") = 1,
           py::arg("policy") = py::dict())
      .def("find", &Find, py::arg("keys"))
      .def("find_or_insert", &FindOrInsert, py::arg("keys"))
      .def("assign", &Assign, py::arg("keys"), py::arg("rows"))
      .def("erase", &Erase, py::arg("keys"))
      .def("clear", &CpuTable::Clear, py::call_guard<py::gil_scoped_release>())
      .def(
          "reserve",
          [](CpuTable& table, int64_t num_keys) {
            const auto pool = SharedPool();
            const py::gil_scoped_release release;
            table.Reserve(*pool, num_keys);
          },
          py::arg("num_keys"))
      .def("export", &Export, py::arg("with_slots") = true)
      .def("import_", &Import, py::arg("keys"), py::arg("rows"), py::arg("slots") = py::none())
      .def("initial_rows", &InitialRows, py::arg("keys"))
      .def("stats", &Stats)
      .def("configure_slots", &ConfigureSlots, py::arg("specs"))
      .def("__len__", &CpuTable::size)
      .def_property_readonly("size", &CpuTable::size)
      .def_property_readonly("capacity", [](const CpuTable& t) { return t.Stats().capacity; })
      .def_property_readonly("slots", &Slots)
      .def_property_readonly("name", [](const CpuTable& t) { return t.options().name; })
      .def_property_readonly("dim", &CpuTable::dim)
      .def_property_readonly("key_dtype",
                             [](const CpuTable& t) { return KeyTypeName(t.options().key_type); });

  BindPolicies(table);
  m.def("_hash_pieces", &HashPieces, py::arg("key"));
  m.def("_philox", &PhiloxWords, py::arg("counter"), py::arg("key"));
}

}  // namespace sok
