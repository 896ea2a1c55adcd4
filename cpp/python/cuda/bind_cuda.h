// Shared by the files of bindings of the device tables.
#ifndef SOK_PYTHON_CUDA_BIND_CUDA_H_
#define SOK_PYTHON_CUDA_BIND_CUDA_H_

#include <cstdint>
#include <mutex>

#include "cpp/core/cuda/table/table.h"
#include "cpp/python/cuda/device_array.h"

namespace sok {

inline const char* KeyTypeString(const cuda::CudaTable& table) {
  return table.options().key_type == KeyType::kUint64 ? "<u8" : "<i8";
}

// Keys of a table: one-dimensional, in its dtype.
inline DeviceView DeviceKeys(const cuda::CudaTable& table, const pybind11::object& keys,
                             cuda::Stream stream) {
  return DeviceView(keys, "keys", {KeyTypeString(table)}, {-1}, stream);
}

// A table's lock, taken and held without the interpreter's lock: who holds the table may need that.
class TableLock {
 public:
  explicit TableLock(const cuda::CudaTable& table) : lock_(table.mutex()) {}

 private:
  const pybind11::gil_scoped_release release_;
  const std::lock_guard<cuda::HeldMutex> lock_;
};

void BindDevice(pybind11::module_& m);
void BindCudaTable(pybind11::module_& m);
void BindCudaOps(pybind11::module_& m);
void BindCudaGroup(pybind11::module_& m);

}  // namespace sok

#endif  // SOK_PYTHON_CUDA_BIND_CUDA_H_
