// Lookups and optimizer steps of many tables, in shared launches.
#include <pybind11/stl.h>

#include <set>

#include "cpp/core/cuda/update/apply.h"
#include "cpp/python/cuda/bind_cuda.h"

namespace py = pybind11;

namespace sok {
namespace {

using cuda::CudaTable;
using cuda::Stream;
using Tables = std::vector<CudaTable*>;

void CheckLength(const Tables& tables, const char* argument, const py::list& list) {
  for (const CudaTable* table : tables) {
    if (table == nullptr) throw py::type_error("`tables` must be tables. Received: None");
  }
  if (list.size() == tables.size()) return;
  throw py::value_error("`" + std::string(argument) + "` must have an array for each of " +
                        std::to_string(tables.size()) +
                        " tables. Received: " + std::to_string(list.size()));
}

// Runs `call` under the locks of the tables and without the interpreter's, which who holds a table
// may need.
template <typename F>
void WithTables(const Tables& tables, const F& call) {
  std::set<cuda::HeldMutex*> mutexes;
  for (CudaTable* table : tables) mutexes.insert(&table->mutex());
  const py::gil_scoped_release release;
  const cuda::HeldMutexes locks(mutexes);
  call();
}

// Keys of each table and the rows of floats that go with them.
struct TableArrays {
  std::vector<DeviceView> keys, rows;

  TableArrays(const Tables& tables, const py::list& key_list, const char* argument,
              const py::list& row_list, Stream stream) {
    CheckLength(tables, "keys", key_list);
    CheckLength(tables, argument, row_list);
    for (size_t t = 0; t < tables.size(); ++t) {
      keys.push_back(DeviceKeys(*tables[t], key_list[t], stream));
      rows.push_back(
          DeviceView(row_list[t], argument, {"<f4"}, {keys[t].length(), tables[t]->dim()}, stream));
    }
  }
};

py::list GroupLookup(const Tables& tables, const py::list& keys, const py::object& rows,
                     bool insert, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  py::list out;
  if (rows.is_none()) {
    CheckLength(tables, "keys", keys);
    for (size_t t = 0; t < tables.size(); ++t) {
      const int64_t num_keys = DeviceKeys(*tables[t], keys[t], stream).length();
      out.append(std::make_unique<CudaArray>(std::vector<int64_t>{num_keys, tables[t]->dim()},
                                             "<f4", stream));
    }
  } else {
    out = rows.cast<py::list>();
  }
  const TableArrays arrays(tables, keys, "rows", out, stream);
  std::vector<CudaTable::TableFind> batches;
  for (size_t t = 0; t < tables.size(); ++t) {
    batches.push_back({tables[t], arrays.keys[t].as<uint64_t>(), arrays.keys[t].length(),
                       arrays.rows[t].as<float>()});
  }
  WithTables(tables, [&] {
    if (insert) {
      CudaTable::FindOrInsert(stream, batches);
    } else {
      CudaTable::Find(stream, batches);
    }
  });
  return out;
}

void GroupApply(const Tables& tables, const std::string& rule, float learning_rate, int64_t step,
                const py::list& keys, const py::list& grads, bool keys_are_unique,
                uint64_t stream_address, const py::kwargs& keywords) {
  const Stream stream = StreamOf(stream_address);
  const OptimizerOptions options = OptionsFromKeywords(rule, keywords);
  const TableArrays arrays(tables, keys, "grads", grads, stream);
  std::vector<cuda::TableGradients> batches;
  for (size_t t = 0; t < tables.size(); ++t) {
    batches.push_back({tables[t], arrays.keys[t].as<uint64_t>(), arrays.rows[t].as<float>(),
                       arrays.keys[t].length()});
  }
  WithTables(tables, [&] {
    cuda::ApplyGradients(stream, batches, options, learning_rate, step, keys_are_unique);
  });
}

}  // namespace

void BindCudaGroup(py::module_& m) {
  m.def("cuda_group_lookup", &GroupLookup, py::arg("tables"), py::arg("keys"),
        py::arg("rows") = py::none(), py::kw_only(), py::arg("insert") = true,
        py::arg("stream") = 0, "Rows of the keys of each table; missing keys are inserted.");
  m.def("cuda_group_apply_gradients", &GroupApply, py::arg("tables"), py::arg("rule"),
        py::arg("learning_rate"), py::arg("step"), py::arg("keys"), py::arg("grads"), py::kw_only(),
        py::arg("keys_are_unique") = false, py::arg("stream") = 0,
        "The same optimizer step on different tables: all make it or none does.");
}

}  // namespace sok
