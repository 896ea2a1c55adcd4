// DLPack: device arrays between libraries without a copy, with an owner and an order of streams.
//
//     capsule "dltensor" ---> DLManagedTensor --> DLTensor: data, device, type, shape, strides
//     (a consumer renames it            |
//      to "used_dltensor")              +--> deleter, called once by whoever owns it
//
// The structs are those of the first DLPack specification, without a version number, which
// `__dlpack__()` gives to a consumer that does not ask for another. Nothing here needs a library.
//
// Invariant: an unused capsule calls the deleter when it is destroyed; a renamed one does not,
// since its consumer does.
#ifndef SOK_PYTHON_CUDA_DLPACK_H_
#define SOK_PYTHON_CUDA_DLPACK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/python/bind.h"

namespace sok {
namespace dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType type;
  int64_t* shape;
  int64_t* strides;  // in elements, or null for row-major order
  uint64_t byte_offset;
};
struct ManagedTensor {
  Tensor tensor;
  void* context;                    // of the producer
  void (*deleter)(ManagedTensor*);  // may be null
};
static_assert(sizeof(void*) != 8 || (sizeof(Tensor) == 48 && sizeof(ManagedTensor) == 64),
              "the layout of the specification");

// An array that came in. The producer keeps the memory until `owner` is destroyed.
struct Incoming {
  uint64_t address = 0;
  std::vector<int64_t> shape;
  std::string type;  // as in NumPy's interface
  bool contiguous = true;
  std::shared_ptr<void> owner;
};

// Whether an array lies in row-major order without gaps. `item`: the stride of neighbours.
bool IsContiguous(const std::vector<int64_t>& shape, const int64_t* strides, int64_t item);

// Takes what `object.__dlpack__` gives for work on `stream`; the producer orders its own work
// before it. Throws ValueError naming `name` for memory that is not of the current CUDA device.
Incoming FromDlpack(const pybind11::object& object, const std::string& name, cuda::Stream stream);

// A capsule that shares `buffer`. `type`: as in NumPy's interface. `consumer`: where it is used; its
// work until the deleter is called comes before the memory is freed. The stream must live so long.
pybind11::capsule ToDlpack(std::shared_ptr<cuda::Buffer> buffer, const std::vector<int64_t>& shape,
                           const std::string& type, cuda::Stream consumer);

}  // namespace dlpack
}  // namespace sok

#endif  // SOK_PYTHON_CUDA_DLPACK_H_
