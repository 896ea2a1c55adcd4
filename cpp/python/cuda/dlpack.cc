#include "cpp/python/cuda/dlpack.h"

#include <utility>

namespace py = pybind11;

namespace sok {
namespace dlpack {
namespace {

constexpr char kFresh[] = "dltensor";
constexpr char kUsed[] = "used_dltensor";

// "<f4" and the like; "?" with the numbers for a type that NumPy has no letter for.
std::string TypeString(const DataType& type) {
  const char* const letter = type.code == kInt     ? "i"
                             : type.code == kUint  ? "u"
                             : type.code == kFloat ? "f"
                             : type.code == kBool  ? "b"
                                                   : nullptr;
  if (letter == nullptr || type.lanes != 1 || type.bits % 8 != 0) {
    return "DLPack type (" + std::to_string(type.code) + ", " + std::to_string(type.bits) + ", " +
           std::to_string(type.lanes) + ")";
  }
  return (type.bits == 8 ? "|" : "<") + std::string(letter) + std::to_string(type.bits / 8);
}

DataType TypeOf(const std::string& type) {
  const uint8_t bits = static_cast<uint8_t>(8 * std::stoi(type.substr(2)));
  switch (type[1]) {
    case 'i':
      return {kInt, bits, 1};
    case 'u':
      return {kUint, bits, 1};
    case 'f':
      return {kFloat, bits, 1};
    case 'b':
      return {kBool, bits, 1};
  }
  throw py::buffer_error("DLPack has no type for " + type);
}

// What an outgoing tensor points to.
struct Outgoing {
  ManagedTensor managed;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // some consumers want them
  std::shared_ptr<cuda::Buffer> buffer;
  cuda::Stream consumer;
};

// Any thread may call this, without Python's lock. The consumer's work may not be done yet.
void DeleteOutgoing(ManagedTensor* managed) {
  const std::unique_ptr<Outgoing> outgoing(static_cast<Outgoing*>(managed->context));
  cuda::Buffer& buffer = *outgoing->buffer;
  cuda::OnDevice(buffer.device(), [&] { cuda::OrderAfter(buffer.stream(), outgoing->consumer); });
}

void DropCapsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kFresh)) return;  // a consumer has taken it
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, kFresh));
  if (managed->deleter != nullptr) managed->deleter(managed);
}

}  // namespace

bool IsContiguous(const std::vector<int64_t>& shape, const int64_t* strides, int64_t item) {
  for (size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] > 1 && strides[axis] != item) return false;
    item *= shape[axis];
  }
  return true;
}

Incoming FromDlpack(const py::object& object, const std::string& name, cuda::Stream stream) {
  const std::string python_type = py::str(py::type::of(object));
  // Asked for first: a producer of another kind of memory need not know about streams.
  const auto [type, id] = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
  const auto check_device = [&](const Device& device) {
    if (device.type != kCuda && device.type != kCudaManaged) {
      throw py::value_error(name + " must be an array in device memory. Received: " + python_type +
                            (device.type == kCpu
                                 ? " in host memory"
                                 : " on a device of DLPack's type " + std::to_string(device.type)));
    }
    if (const int current = cuda::CurrentDevice(); device.id != current) {
      throw py::value_error(name + " must be on the current CUDA device, " +
                            std::to_string(current) + ". Received: an array on device " +
                            std::to_string(device.id));
    }
  };
  check_device({type, id});
  // 1 is the default stream here, and 0 is not allowed.
  const uint64_t address = stream == nullptr ? 1 : reinterpret_cast<uint64_t>(stream);
  const py::object capsule = object.attr("__dlpack__")(py::arg("stream") = address);
  if (!PyCapsule_IsValid(capsule.ptr(), kFresh)) {
    throw py::value_error(name + " must give a capsule named 'dltensor' by __dlpack__. Received: " +
                          std::string(py::repr(capsule)));
  }
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kFresh));
  if (PyCapsule_SetName(capsule.ptr(), kUsed) != 0) throw py::error_already_set();
  Incoming incoming;  // from here on it is ours to delete
  incoming.owner = std::shared_ptr<void>(managed, [](void* pointer) {
    auto* const taken = static_cast<ManagedTensor*>(pointer);
    if (taken->deleter != nullptr) taken->deleter(taken);
  });
  const Tensor& tensor = managed->tensor;
  check_device(tensor.device);
  incoming.address = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
  incoming.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  incoming.type = TypeString(tensor.type);
  incoming.contiguous =
      tensor.strides == nullptr || IsContiguous(incoming.shape, tensor.strides, 1);
  return incoming;
}

py::capsule ToDlpack(std::shared_ptr<cuda::Buffer> buffer, const std::vector<int64_t>& shape,
                     const std::string& type, cuda::Stream consumer) {
  auto outgoing = std::make_unique<Outgoing>();
  outgoing->shape = shape;
  outgoing->strides.resize(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    outgoing->strides[axis] = stride;
    stride *= shape[axis];
  }
  Tensor& tensor = outgoing->managed.tensor;
  tensor.data = buffer->data();
  tensor.device = {kCuda, buffer->device()};
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.type = TypeOf(type);
  tensor.shape = outgoing->shape.data();
  tensor.strides = outgoing->strides.data();
  tensor.byte_offset = 0;
  outgoing->buffer = std::move(buffer);
  outgoing->consumer = consumer;
  outgoing->managed.context = outgoing.get();
  outgoing->managed.deleter = &DeleteOutgoing;
  PyObject* const capsule = PyCapsule_New(&outgoing->managed, kFresh, &DropCapsule);
  if (capsule == nullptr) throw py::error_already_set();
  outgoing.release();  // the capsule or its consumer owns it now
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace dlpack
}  // namespace sok
