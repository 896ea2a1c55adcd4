// `_core.Table`: CpuTable on NumPy arrays.
#include <shared_mutex>
#include <type_traits>

#include "cpp/core/cpu/table.h"
#include "cpp/core/hash.h"
#include "cpp/python/table_calls.h"

namespace py = pybind11;

namespace sok {
namespace {

// An array of this shape, or an error. Elements of other types are converted.
template <typename T>
py::array_t<T> ArrayOfShape(const py::object& values, const std::vector<int64_t>& shape,
                            const char* argument) {
  if constexpr (std::is_same_v<T, float>) {
    return FloatsOfShape(values, shape, argument);
  } else {
    auto array = py::array_t<T, py::array::c_style | py::array::forcecast>::ensure(values);
    if (array && array.ndim() == 1 && array.size() == shape[0]) return array;
    PyErr_Clear();
    throw py::value_error(std::string("`") + argument + "` must hold " + std::to_string(shape[0]) +
                          " values, one per key. Received: " + std::to_string(py::len(values)));
  }
}

struct HostMemory {
  using Table = CpuTable;

  class Call {
   public:
    Call() : pool_(SharedPool()) {}
    operator CallContext() const { return *pool_; }

   private:
    std::shared_ptr<ThreadPool> pool_;
  };
  static Call LastCall(const CpuTable&) { return Call(); }

  struct Keys : KeyArray {
    Keys(const CpuTable& table, const py::object& keys, const Call&)
        : KeyArray(keys, table.options().key_type) {}
  };

  template <typename T>
  class Input {
   public:
    Input(const py::object& values, const char* argument, const std::vector<int64_t>& shape,
          const Call&)
        : array_(ArrayOfShape<T>(values, shape, argument)) {}
    const T* data() const { return array_.data(); }

   private:
    const py::array_t<T> array_;
  };

  template <typename T>
  class Output {
   public:
    Output(const py::object&, const char*, const std::vector<int64_t>& shape, const Call&)
        : array_(std::vector<py::ssize_t>(shape.begin(), shape.end())),
          data_(array_.mutable_data()) {}
    auto data() const {
      if constexpr (std::is_same_v<T, bool>) {
        return reinterpret_cast<uint8_t*>(data_);
      } else {
        return data_;
      }
    }
    py::object object() const { return array_; }

   private:
    py::array_t<T, py::array::c_style> array_;
    T* data_;
  };

  static std::shared_ptr<CpuTable> Make(const TableOptions& options) {
    return std::make_shared<CpuTable>(options);
  }
};

FloatArray InitialRows(const CpuTable& table, const py::object& key_object) {
  const KeyArray keys(key_object, table.options().key_type);
  FloatArray rows = NewFloats({keys.size(), table.dim()});
  float* const row_data = rows.mutable_data();
  const py::gil_scoped_release release;
  const std::shared_lock<TableMutex> lock(table.mutex());
  for (int64_t i = 0; i < keys.size(); ++i) {
    table.InitialRow(keys.data()[i], row_data + i * table.dim());
  }
  return rows;
}

// (shard, home bucket, digest) of a key, for tests that need colliding keys.
py::tuple HashPieces(int64_t key, uint64_t num_buckets) {
  const uint64_t hash = HashKey(static_cast<uint64_t>(key));
  return py::make_tuple(HashShard(hash), ProbeHome::Of(num_buckets)(hash), HashDigest(hash));
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
  py::class_<SlotVariableSpec>(m, "SlotVariableSpec",
                               "A slot variable: a name and `width` floats behind each row.")
      .def(py::init([](const std::string& name, int64_t width, float initial, bool saved) {
             return SlotVariableSpec{name, width, initial, saved};
           }),
           py::arg("name"), py::arg("width"), py::kw_only(), py::arg("initial") = 0.0f,
           py::arg("saved") = true)
      .def_readonly("name", &SlotVariableSpec::name)
      .def_readonly("width", &SlotVariableSpec::width)
      .def_readonly("initial", &SlotVariableSpec::initial)
      .def_readonly("saved", &SlotVariableSpec::saved);

  using Calls = TableCalls<HostMemory>;
  py::class_<CpuTable, std::shared_ptr<CpuTable>> table(m, "Table", "One rank's shard of a table.");
  Calls::BindConstructor(table);
  Calls::Bind(table);
  table
      .def(
          "find",
          [](const CpuTable& t, const py::object& keys) {
            return Calls::Find(t, keys, py::none(), py::none());
          },
          py::arg("keys"))
      .def(
          "find_or_insert",
          [](CpuTable& t, const py::object& keys) {
            return Calls::FindOrInsert(t, keys, py::none(), py::none());
          },
          py::arg("keys"))
      .def("initial_rows", &InitialRows, py::arg("keys"));
  m.def("_hash_pieces", &HashPieces, py::arg("key"), py::arg("num_buckets") = 4);
}

}  // namespace sok
