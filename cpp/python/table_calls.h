// The calls of core/table.h as methods of a Python class, for tables of any memory: `_core.Table`
// on NumPy arrays, `_core.CudaTable` on device arrays.
//
// `Memory` says what differs:
//
//     Table                the class
//     Call                 what a call runs on, made from its last argument: `Stream...` is
//                          nothing, or the address of a stream. Converts to CallContext
//     Call LastCall(table) for properties, which have no such argument
//     Keys, Input<T>       arrays in the table's memory that come in: data(), size()
//     Output<T>            an array that goes out, which the caller may provide: data(),
//                          object()
//
// Snapshots, evicted rows and counts are NumPy arrays in host memory for all tables. The
// interpreter's lock is released around every call: tables lock themselves.
#ifndef SOK_PYTHON_TABLE_CALLS_H_
#define SOK_PYTHON_TABLE_CALLS_H_

#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/table.h"
#include "cpp/python/bind.h"

namespace sok {

// (keys, rows, {slot: rows}) and back.
pybind11::tuple SnapshotToTuple(const TableSnapshot& snapshot, const TableOptions& options);
TableSnapshot SnapshotFrom(const pybind11::object& keys, const pybind11::object& rows,
                           const std::optional<pybind11::dict>& slots, const TableOptions& options);
pybind11::dict EvictedToDict(const EvictedRows& popped, const TableOptions& options);

// The fields that ForEachField lists.
template <typename Statistics>
pybind11::dict FieldsToDict(const Statistics& statistics) {
  pybind11::dict out;
  statistics.ForEachField([&](const char* name, auto value) { out[name] = value; });
  return out;
}

template <typename Memory, typename... Stream>
struct TableCalls {
  using Table = typename Memory::Table;
  using Call = typename Memory::Call;
  using Keys = typename Memory::Keys;
  template <typename T>
  using Input = typename Memory::template Input<T>;
  template <typename T>
  using Output = typename Memory::template Output<T>;
  using object = pybind11::object;

  // Calls `call` without the interpreter's lock.
  template <typename F>
  static auto Released(F&& call) {
    const pybind11::gil_scoped_release release;
    return call();
  }

  // A method of core/table.h without arrays.
  template <typename Result, typename... Args>
  static auto Plain(Result (Table::*method)(CallContext, Args...)) {
    return [method](Table& table, Args... args, Stream... stream) {
      const Call call(stream...);
      return Released([&] { return (table.*method)(call, args...); });
    };
  }

  // A method that takes keys alone.
  template <typename Result>
  static auto OfKeys(Result (Table::*method)(CallContext, const uint64_t*, int64_t)) {
    return [method](Table& table, const object& key_object, Stream... stream) {
      const Call call(stream...);
      const Keys keys(table, key_object, call);
      return Released([&] { return (table.*method)(call, keys.data(), keys.size()); });
    };
  }

  // A method that returns a struct, here a dictionary.
  template <typename Result>
  static auto AsDict(Result (Table::*method)(CallContext) const) {
    return [method](const Table& table, Stream... stream) {
      const Call call(stream...);
      return FieldsToDict(Released([&] { return (table.*method)(call); }));
    };
  }

  static pybind11::tuple Find(const Table& table, const object& key_object, const object& rows,
                              const object& found, Stream... stream) {
    const Call call(stream...);
    const Keys keys(table, key_object, call);
    const Output<float> out(rows, "rows", {keys.size(), table.dim()}, call);
    const Output<bool> flags(found, "found", {keys.size()}, call);
    Released([&] { table.Find(call, keys.data(), keys.size(), out.data(), flags.data()); });
    return pybind11::make_tuple(out.object(), flags.object());
  }

  static pybind11::tuple FindOrInsert(Table& table, const object& key_object, const object& rows,
                                      const object& inserted, Stream... stream) {
    const Call call(stream...);
    const Keys keys(table, key_object, call);
    const Output<float> out(rows, "rows", {keys.size(), table.dim()}, call);
    const Output<bool> flags(inserted, "inserted", {keys.size()}, call);
    Released([&] { table.FindOrInsert(call, keys.data(), keys.size(), out.data(), flags.data()); });
    return pybind11::make_tuple(out.object(), flags.object());
  }

  static void Assign(Table& table, const object& key_object, const object& rows, Stream... stream) {
    const Call call(stream...);
    const Keys keys(table, key_object, call);
    const Input<float> values(rows, "rows", {keys.size(), table.dim()}, call);
    Released([&] { table.Assign(call, keys.data(), keys.size(), values.data()); });
  }

  static pybind11::tuple Export(Table& table, bool with_slots, Stream... stream) {
    const Call call(stream...);
    return SnapshotToTuple(Released([&] { return table.Export(call, with_slots); }),
                           table.options());
  }

  static void Import(Table& table, const object& keys, const object& rows,
                     const std::optional<pybind11::dict>& slots, Stream... stream) {
    const Call call(stream...);
    const TableSnapshot snapshot = SnapshotFrom(keys, rows, slots, table.options());
    Released([&] { table.Import(call, snapshot); });
  }

  static int64_t Size(const Table& table) {
    const Call call = Memory::LastCall(table);
    return Released([&] { return table.Size(call); });
  }

  static int64_t Capacity(const Table& table) {
    const Call call = Memory::LastCall(table);
    return Released([&] { return table.Stats(call).capacity; });
  }

  static pybind11::dict PopEvicted(Table& table) {
    return EvictedToDict(Released([&] { return table.PopEvicted(); }), table.options());
  }

  static pybind11::tuple KeyStatistics(const Table& table, const object& key_object,
                                       Stream... stream) {
    const Call call(stream...);
    const Keys keys(table, key_object, call);
    const object none = pybind11::none();
    const Output<bool> present(none, "", {keys.size()}, call);
    const Output<int64_t> frequencies(none, "", {keys.size()}, call);
    const Output<int64_t> last_steps(none, "", {keys.size()}, call);
    Released([&] {
      table.KeyStatistics(call, keys.data(), keys.size(), present.data(), frequencies.data(),
                          last_steps.data());
    });
    return pybind11::make_tuple(present.object(), frequencies.object(), last_steps.object());
  }

  static int64_t AssignScores(Table& table, const object& key_object, const object& scores,
                              Stream... stream) {
    const Call call(stream...);
    const Keys keys(table, key_object, call);
    const Input<int64_t> values(scores, "scores", {keys.size()}, call);
    return Released(
        [&] { return table.AssignScores(call, keys.data(), keys.size(), values.data()); });
  }

  // `more`: further arguments of Memory::Make.
  template <typename... More>
  static std::shared_ptr<Table> Make(const std::string& name, int64_t dim,
                                     const std::string& key_dtype, const std::string& row_dtype,
                                     const std::string& initializer, float a, float b,
                                     const object& default_rows, uint64_t seed,
                                     int64_t initial_capacity, int64_t max_capacity,
                                     bool use_hashtable, int64_t rank, int64_t world_size,
                                     const pybind11::dict& policy, const pybind11::dict& storage,
                                     More... more) {
    TableOptions options;
    options.name = name;
    options.dim = dim;
    options.key_type = ParseKeyType(key_dtype);
    options.row_type = ParseRowType(row_dtype);
    SetInitializer(initializer, a, b, default_rows, &options);
    options.seed = seed;
    options.initial_capacity = initial_capacity;
    options.max_capacity = max_capacity;
    options.policy = ParsePolicy(policy);
    options.storage = ParseStorage(storage);
    options.use_hashtable = use_hashtable;
    options.rank = rank;
    options.world_size = world_size;
    return Memory::Make(options, more...);
  }

  // Defines the constructor, whose further arguments are `more_args`.
  template <typename... More, typename Class, typename... Args>
  static void BindConstructor(Class& table, Args... more_args) {
    using pybind11::arg;
    table.def(pybind11::init(&Make<More...>), arg("name"), arg("dim"), pybind11::kw_only(),
              arg("key_dtype") = "int64", arg("row_dtype") = "float32",
              arg("initializer") = "uniform", arg("a") = -0.05f, arg("b") = 0.05f,
              arg("default_rows") = pybind11::none(), arg("seed") = 0, arg("initial_capacity") = 0,
              arg("max_capacity") = 0, arg("use_hashtable") = true, arg("rank") = 0,
              arg("world_size") = 1, arg("policy") = pybind11::dict(),
              arg("storage") = pybind11::dict(), more_args...);
  }

  // Defines all methods except the constructor, find and find_or_insert. `last`: the arguments that
  // name the stream.
  template <typename Class, typename... Last>
  static void Bind(Class& table, Last... last) {
    using pybind11::arg;
    table.def("assign", &Assign, arg("keys"), arg("rows"), last...)
        .def("erase", OfKeys(&Table::Erase), arg("keys"), last...)
        .def("clear", Plain(&Table::Clear), last...)
        .def("reserve", Plain(&Table::Reserve), arg("num_keys"), last...)
        .def("export", &Export, arg("with_slots") = true, last...)
        .def("import_", &Import, arg("keys"), arg("rows"), arg("slots") = pybind11::none(), last...)
        .def("stats", AsDict(&Table::Stats), last...)
        .def("configure_slots", Plain(&Table::ConfigureSlots), arg("specs"), last...)
        .def("__len__", &Size)
        .def_property_readonly("size", &Size)
        .def_property_readonly("capacity", &Capacity)
        .def_property_readonly("slots", [](const Table& t) { return t.Slots(); })
        .def_property_readonly("name", [](const Table& t) { return t.options().name; })
        .def_property_readonly("dim", [](const Table& t) { return t.dim(); })
        .def_property_readonly("key_dtype",
                               [](const Table& t) { return KeyTypeName(t.options().key_type); })
        .def("observe", OfKeys(&Table::RecordTrainingLookup), arg("keys"), last...)
        .def("evict", Plain(&Table::Evict), last...)
        .def("pop_evicted", &PopEvicted)
        .def("statistics", AsDict(&Table::Statistics), last...)
        .def("key_statistics", &KeyStatistics, arg("keys"), last...)
        .def("assign_scores", &AssignScores, arg("keys"), arg("scores"), last...)
        .def("set_step", &Table::SetStep, arg("step"),
             pybind11::call_guard<pybind11::gil_scoped_release>())
        .def_property_readonly("keeps_records", [](const Table& t) { return t.keeps_records(); });
  }
};

}  // namespace sok

#endif  // SOK_PYTHON_TABLE_CALLS_H_
