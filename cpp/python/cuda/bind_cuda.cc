// `_core.CudaTable`: CudaTable on device arrays, with the methods of `_core.Table`.
//
// Every method takes `stream=` (the address of a CUDA stream, 0 for the default one) and returns
// before the device has done the work, unless it returns a value on the host. Results are
// CudaArrays, or the arrays given as `rows=` and `found=`, so that a loop need not allocate.
#include "cpp/python/cuda/bind_cuda.h"

#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>

#include "cpp/python/table_calls.h"

namespace py = pybind11;

namespace sok {
namespace {

using cuda::CudaTable;
using cuda::Stream;

template <typename T>
constexpr const char* kTypeString = nullptr;
template <>
constexpr const char* kTypeString<float> = "<f4";
template <>
constexpr const char* kTypeString<bool> = "|b1";
template <>
constexpr const char* kTypeString<int64_t> = "<i8";
template <>
constexpr const char* kTypeString<uint32_t> = "<u4";

struct DeviceMemory {
  using Table = CudaTable;

  struct Call {
    explicit Call(uint64_t address) : stream(StreamOf(address)) {}
    explicit Call(Stream given) : stream(given) {}
    operator CallContext() const { return stream; }
    Stream stream;
  };
  static Call LastCall(const CudaTable& table) { return Call(table.stream()); }

  class Keys {
   public:
    Keys(const CudaTable& table, const py::object& keys, const Call& call)
        : view_(DeviceKeys(table, keys, call.stream)) {}
    const uint64_t* data() const { return view_.as<uint64_t>(); }
    int64_t size() const { return view_.length(); }

   private:
    const DeviceView view_;
  };

  template <typename T>
  class Input {
   public:
    Input(const py::object& values, const char* argument, const std::vector<int64_t>& shape,
          const Call& call)
        : view_(values, argument, {kTypeString<T>}, shape, call.stream) {}
    const T* data() const { return view_.template as<T>(); }
    int64_t size() const { return view_.length(); }

   private:
    const DeviceView view_;
  };

  // The caller's array, checked, or a new array.
  template <typename T>
  class Output {
   public:
    using Element = std::conditional_t<std::is_same_v<T, bool>, uint8_t, T>;

    Output(const py::object& given, const char* argument, const std::vector<int64_t>& shape,
           const Call& call) {
      if (given.is_none()) {
        auto array = std::make_unique<CudaArray>(shape, kTypeString<T>, call.stream);
        data_ = array->template as<Element>();
        object_ = py::cast(std::move(array));
      } else {
        // A flag may be written to booleans or to bytes.
        std::vector<const char*> types = {kTypeString<T>};
        if (std::is_same_v<T, bool>) types.push_back("|u1");
        view_.emplace(given, argument, types, shape, call.stream);
        data_ = view_->template as<Element>();
        object_ = given;
      }
    }
    Element* data() const { return data_; }
    py::object object() const { return object_; }

   private:
    py::object object_;
    std::optional<DeviceView> view_;  // of the caller's array
    Element* data_ = nullptr;
  };

  static std::shared_ptr<CudaTable> Make(const TableOptions& options, double max_load_factor,
                                         uint64_t stream) {
    if (options.key_type != KeyType::kInt64 && options.key_type != KeyType::kUint64) {
      throw py::value_error(
          "`key_dtype` must be int64 or uint64 for a table in device memory. Received: " +
          std::string(KeyTypeName(options.key_type)) + " (table '" + options.name + "')");
    }
    return std::make_shared<CudaTable>(options, max_load_factor, StreamOf(stream));
  }
};

py::object RowNumbers(CudaTable& table, const py::object& key_object, bool insert,
                      const py::object& out, uint64_t stream) {
  const DeviceMemory::Call call(stream);
  const DeviceMemory::Keys keys(table, key_object, call);
  const DeviceMemory::Output<uint32_t> numbers(out, "out", {keys.size()}, call);
  {
    const TableLock lock(table);
    if (insert) {
      table.FindOrInsertRows(call.stream, keys.data(), keys.size(), numbers.data(), nullptr);
    } else {
      table.FindRows(call.stream, keys.data(), keys.size(), numbers.data());
    }
  }
  return numbers.object();
}

py::object Gather(CudaTable& table, const py::object& row_numbers, const py::object& rows,
                  uint64_t stream) {
  const DeviceMemory::Call call(stream);
  const DeviceMemory::Input<uint32_t> numbers(row_numbers, "row_numbers", {-1}, call);
  const DeviceMemory::Output<float> out(rows, "rows", {numbers.size(), table.dim()}, call);
  {
    const TableLock lock(table);
    table.GatherRows(call.stream, numbers.data(), numbers.size(), out.data());
  }
  return out.object();
}

}  // namespace

void BindCudaTable(py::module_& m) {
  using Calls = TableCalls<DeviceMemory, uint64_t>;
  const auto stream = [] { return py::arg("stream") = 0; };
  py::class_<CudaTable, std::shared_ptr<CudaTable>> table(
      m, "CudaTable", "One rank's shard of a table, in device memory.");
  Calls::BindConstructor<double, uint64_t>(table, py::arg("max_load_factor") = 0.875, stream());
  Calls::Bind(table, py::kw_only(), stream());
  table
      .def("find", &Calls::Find, py::arg("keys"), py::kw_only(), py::arg("rows") = py::none(),
           py::arg("found") = py::none(), stream())
      .def("find_or_insert", &Calls::FindOrInsert, py::arg("keys"), py::kw_only(),
           py::arg("rows") = py::none(), py::arg("inserted") = py::none(), stream())
      .def("row_numbers", &RowNumbers, py::arg("keys"), py::kw_only(), py::arg("insert") = false,
           py::arg("out") = py::none(), stream())
      .def("gather", &Gather, py::arg("row_numbers"), py::kw_only(), py::arg("rows") = py::none(),
           stream());
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
