// `_core`: the core on NumPy arrays, without TensorFlow. For tests, tools and serving.
#include <algorithm>
#include <limits>
#include <mutex>
#include <thread>

#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

std::mutex pool_mutex;
std::shared_ptr<ThreadPool> pool;  // made at the first call that needs it

std::string ShapeText(const py::array& array) { return py::str(array.attr("shape")); }

// Copies with a check of each value; `Received` is the array's element type.
template <typename Received>
void Widen(const py::array& array, KeyType type, const char* argument, uint64_t* out) {
  const Received* const values = static_cast<const Received*>(array.data());
  const int64_t n = array.size();
  const bool to_signed = type == KeyType::kInt64 || type == KeyType::kInt32;
  const bool narrow = type == KeyType::kInt32 || type == KeyType::kUint32;
  const int64_t low = !to_signed ? 0
                      : narrow   ? std::numeric_limits<int32_t>::min()
                                 : std::numeric_limits<int64_t>::min();
  const uint64_t high = type == KeyType::kInt32    ? std::numeric_limits<int32_t>::max()
                        : type == KeyType::kUint32 ? std::numeric_limits<uint32_t>::max()
                        : type == KeyType::kInt64  ? std::numeric_limits<int64_t>::max()
                                                   : std::numeric_limits<uint64_t>::max();
  for (int64_t i = 0; i < n; ++i) {
    const Received v = values[i];
    const bool fits = v < 0 ? static_cast<int64_t>(v) >= low : static_cast<uint64_t>(v) <= high;
    if (!fits) {
      throw py::value_error(std::string("`") + argument + "` must fit in " + KeyTypeName(type) +
                            ". Received: " + std::to_string(v) + " at position " +
                            std::to_string(i));
    }
    out[i] = static_cast<uint64_t>(static_cast<int64_t>(v));
  }
}

}  // namespace

std::shared_ptr<ThreadPool> SharedPool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool == nullptr) {
    pool = std::make_shared<ThreadPool>(std::max(1u, std::thread::hardware_concurrency()));
  }
  return pool;
}

KeyArray::KeyArray(const py::object& keys, KeyType type, const char* argument) {
  array_ = py::array::ensure(keys, py::array::c_style);
  if (!array_) {
    PyErr_Clear();
    throw py::value_error(std::string("`") + argument + "` must be an array of integers");
  }
  if (array_.ndim() != 1) {
    throw py::value_error(std::string("`") + argument +
                          "` must have shape [num_keys]. Received shape: " + ShapeText(array_));
  }
  size_ = array_.size();
  if (size_ == 0) return;  // of any dtype: an empty list becomes float64
  const bool is_int64 = py::isinstance<py::array_t<int64_t>>(array_);
  const bool is_uint64 = py::isinstance<py::array_t<uint64_t>>(array_);
  if ((is_int64 && type == KeyType::kInt64) || (is_uint64 && type == KeyType::kUint64)) {
    data_ = static_cast<const uint64_t*>(array_.data());
    return;
  }
  widened_.resize(static_cast<size_t>(size_));
  data_ = widened_.data();
  if (is_int64) {
    Widen<int64_t>(array_, type, argument, widened_.data());
  } else if (is_uint64) {
    Widen<uint64_t>(array_, type, argument, widened_.data());
  } else if (py::isinstance<py::array_t<int32_t>>(array_)) {
    Widen<int32_t>(array_, type, argument, widened_.data());
  } else if (py::isinstance<py::array_t<uint32_t>>(array_)) {
    Widen<uint32_t>(array_, type, argument, widened_.data());
  } else {
    throw py::value_error(std::string("`") + argument +
                          "` must have dtype int64, int32, uint64 or uint32. Received: " +
                          std::string(py::str(array_.dtype())));
  }
}

py::array KeysToNumpy(const uint64_t* keys, int64_t num_keys, KeyType type) {
  py::array out(py::dtype(KeyTypeName(type)), std::vector<py::ssize_t>{num_keys});
  if (type == KeyType::kInt64 || type == KeyType::kUint64) {
    std::copy_n(keys, num_keys, static_cast<uint64_t*>(out.mutable_data()));
  } else {
    uint32_t* const narrow = static_cast<uint32_t*>(out.mutable_data());
    for (int64_t i = 0; i < num_keys; ++i) narrow[i] = static_cast<uint32_t>(keys[i]);
  }
  return out;
}

FloatArray FloatsOfShape(const py::object& values, const std::vector<int64_t>& shape,
                         const char* argument) {
  auto array = py::array_t<float, py::array::c_style | py::array::forcecast>::ensure(values);
  if (!array) {
    PyErr_Clear();
    throw py::value_error(std::string("`") + argument + "` must be an array of floats");
  }
  if (!std::equal(shape.begin(), shape.end(), array.shape(), array.shape() + array.ndim())) {
    std::string wanted;
    for (int64_t n : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(n);
    throw py::value_error(std::string("`") + argument + "` must have shape [" + wanted +
                          "]. Received shape: " + ShapeText(array));
  }
  return FloatArray(array);
}

FloatArray NewFloats(const std::vector<int64_t>& shape) {
  return FloatArray(std::vector<py::ssize_t>(shape.begin(), shape.end()));
}

}  // namespace sok

PYBIND11_MODULE(_core, m) {
  m.doc() = "Tables, optimizers and routing on NumPy arrays.";
  m.def(
      "set_num_threads",
      [](int num_threads) {
        auto replacement = std::make_shared<sok::ThreadPool>(num_threads);
        std::lock_guard<std::mutex> lock(sok::pool_mutex);
        sok::pool.swap(replacement);
      },
      py::arg("num_threads"), "Number of threads that later calls run on, the caller included.");
  m.def("num_threads", [] { return sok::SharedPool()->num_threads(); });
  sok::BindTable(m);
  sok::BindRoute(m);
  sok::BindOptimizer(m);
  sok::BindCrc32(m);
  sok::BindCuda(m);
}
