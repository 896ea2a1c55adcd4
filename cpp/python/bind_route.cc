// Routing and combining on NumPy arrays.
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/route.h"
#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;
using SplitArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// Unsigned arrays are uint64 keys, all others int64.
KeyType TypeOfKeys(const py::object& keys) {
  const py::object dtype = py::getattr(keys, "dtype", py::none());
  if (dtype.is_none()) return KeyType::kInt64;
  return dtype.attr("kind").cast<std::string>() == "u" ? KeyType::kUint64 : KeyType::kInt64;
}

void Require(bool condition, const std::string& message) {
  if (!condition) throw py::value_error(message);
}

// The checked arguments of a combine call as NumPy arrays, and the Samples that refer to them.
struct SampleArrays {
  IntArray inverse;
  SplitArray row_splits;
  FloatArray weights;
  Samples samples;

  SampleArrays(const py::object& inverse_arg, const py::object& row_splits_arg,
               const std::string& combiner, const py::object& weights_arg, int64_t num_unique)
      : inverse(inverse_arg) {
    samples.combiner = ParseCombiner(combiner);
    Require(inverse.ndim() == 1, "`inverse` must have shape [num_keys]. Received " +
                                     std::to_string(inverse.ndim()) + " dimensions");
    samples.inverse = inverse.data();
    samples.num_keys = inverse.size();
    for (int64_t k = 0; k < samples.num_keys; ++k) {
      Require(samples.inverse[k] >= 0 && samples.inverse[k] < num_unique,
              "`inverse` must lie in [0, " + std::to_string(num_unique) + "). Received: " +
                  std::to_string(samples.inverse[k]) + " at position " + std::to_string(k));
    }
    const bool none = samples.combiner == Combiner::kNone;
    Require(none == row_splits_arg.is_none(),
            none ? "`row_splits` must be None with combiner 'none'"
                 : "`row_splits` must be given with combiner '" + combiner + "'");
    if (!none) {
      row_splits = SplitArray(row_splits_arg);
      Require(row_splits.ndim() == 1 && row_splits.size() >= 1 && row_splits.at(0) == 0 &&
                  row_splits.at(row_splits.size() - 1) == samples.num_keys,
              "`row_splits` must have shape [batch + 1] and run from 0 to num_keys = " +
                  std::to_string(samples.num_keys));
      samples.row_splits = row_splits.data();
      samples.batch = row_splits.size() - 1;
      for (int64_t s = 0; s < samples.batch; ++s) {
        Require(samples.row_splits[s] <= samples.row_splits[s + 1],
                "`row_splits` must ascend. Received: " + std::to_string(samples.row_splits[s]) +
                    " before " + std::to_string(samples.row_splits[s + 1]));
      }
    }
    if (!weights_arg.is_none()) {
      weights = FloatsOfShape(weights_arg, {samples.num_keys}, "weights");
      samples.weights = weights.data();
    }
  }
};

// [num_rows, dim], both of any length.
FloatArray Matrix(const py::object& values, const char* argument) {
  const auto array = py::array_t<float, py::array::c_style | py::array::forcecast>::ensure(values);
  if (!array) PyErr_Clear();
  Require(static_cast<bool>(array), "`" + std::string(argument) + "` must be an array of floats");
  Require(array.ndim() == 2, "`" + std::string(argument) + "` must have two dimensions. Received " +
                                 std::to_string(array.ndim()));
  return FloatArray(array);
}

std::vector<const float*> RowPointers(const FloatArray& rows) {
  std::vector<const float*> pointers(rows.shape(0));
  for (int64_t u = 0; u < rows.shape(0); ++u) pointers[u] = rows.data() + u * rows.shape(1);
  return pointers;
}

py::tuple UniqueWithInverse(const py::object& keys, int64_t world_size) {
  const KeyType type = TypeOfKeys(keys);
  const KeyArray key_array(keys, type);
  py::array_t<int32_t> inverse(key_array.size());
  int32_t* const inverse_data = inverse.mutable_data();
  std::vector<uint64_t> unique;
  std::vector<int64_t> owner_offsets;
  {
    const py::gil_scoped_release release;
    const std::shared_ptr<ThreadPool> pool = SharedPool();
    const Route route(*pool, key_array.data(), key_array.size(), world_size, inverse_data);
    unique.resize(route.num_unique());
    route.WriteUnique(*pool, unique.data());
    owner_offsets = route.owner_offsets();
  }
  py::array_t<int64_t> offsets(owner_offsets.size(), owner_offsets.data());
  return py::make_tuple(KeysToNumpy(unique.data(), unique.size(), type), inverse, offsets);
}

FloatArray Combine(const py::object& rows, const py::object& inverse, const py::object& row_splits,
                   const std::string& combiner, const py::object& weights) {
  const FloatArray row_array = Matrix(rows, "rows");
  const SampleArrays arrays(inverse, row_splits, combiner, weights, row_array.shape(0));
  const int64_t dim = row_array.shape(1);
  FloatArray out = NewFloats({arrays.samples.num_samples(), dim});
  const std::vector<const float*> pointers = RowPointers(row_array);
  float* const out_data = out.mutable_data();
  const py::gil_scoped_release release;
  CombineRows(*SharedPool(), arrays.samples, pointers.data(), pointers.size(), dim, out_data);
  return out;
}

FloatArray Gradient(const py::object& grad, const py::object& inverse, const py::object& row_splits,
                    int64_t num_unique, const std::string& combiner, const py::object& weights) {
  const SampleArrays arrays(inverse, row_splits, combiner, weights, num_unique);
  const int64_t dim = Matrix(grad, "grad").shape(1);
  const FloatArray grad_array = FloatsOfShape(grad, {arrays.samples.num_samples(), dim}, "grad");
  FloatArray out = NewFloats({num_unique, dim});
  float* const out_data = out.mutable_data();
  const py::gil_scoped_release release;
  CombineGradient(*SharedPool(), arrays.samples, grad_array.data(), num_unique, dim, out_data);
  return out;
}

FloatArray GradientOfWeights(const py::object& rows, const py::object& grad,
                             const py::object& inverse, const py::object& row_splits,
                             const std::string& combiner, const py::object& weights) {
  const FloatArray row_array = Matrix(rows, "rows");
  const SampleArrays arrays(inverse, row_splits, combiner, weights, row_array.shape(0));
  const int64_t dim = row_array.shape(1);
  const FloatArray grad_array = FloatsOfShape(grad, {arrays.samples.num_samples(), dim}, "grad");
  FloatArray out = NewFloats({arrays.samples.num_keys});
  const std::vector<const float*> pointers = RowPointers(row_array);
  float* const out_data = out.mutable_data();
  const py::gil_scoped_release release;
  WeightGradient(*SharedPool(), arrays.samples, pointers.data(), grad_array.data(), dim, out_data);
  return out;
}

py::tuple Merge(const py::object& keys, const py::object& grads) {
  const KeyType type = TypeOfKeys(keys);
  const KeyArray key_array(keys, type);
  const int64_t dim = Matrix(grads, "grads").shape(1);
  const FloatArray grad_array = FloatsOfShape(grads, {key_array.size(), dim}, "grads");
  std::vector<uint64_t> unique_keys(key_array.size());
  std::vector<float> unique_grads(key_array.size() * dim);
  int64_t num_unique = 0;
  {
    const py::gil_scoped_release release;
    num_unique = MergeGradients(*SharedPool(), key_array.data(), grad_array.data(),
                                key_array.size(), dim, unique_keys.data(), unique_grads.data());
  }
  FloatArray out = NewFloats({num_unique, dim});
  std::copy_n(unique_grads.data(), num_unique * dim, out.mutable_data());
  return py::make_tuple(KeysToNumpy(unique_keys.data(), num_unique, type), out);
}

}  // namespace

void BindRoute(py::module_& m) {
  m.def("unique_with_inverse", &UniqueWithInverse, py::arg("keys"), py::arg("world_size") = 1,
        "Unique keys grouped by owner, inverse [num_keys], owner_offsets [world_size + 1].");
  m.def("combine", &Combine, py::arg("rows"), py::arg("inverse"), py::arg("row_splits"),
        py::arg("combiner") = "sum", py::arg("weights") = py::none(),
        "Rows of each sample reduced to one: [batch, dim], or [num_keys, dim] with 'none'.");
  m.def("combine_gradient", &Gradient, py::arg("grad"), py::arg("inverse"), py::arg("row_splits"),
        py::arg("num_unique"), py::arg("combiner") = "sum", py::arg("weights") = py::none(),
        "Gradient of `combine` by unique row: [num_unique, dim].");
  m.def("weight_gradient", &GradientOfWeights, py::arg("rows"), py::arg("grad"), py::arg("inverse"),
        py::arg("row_splits"), py::arg("combiner") = "sum", py::arg("weights") = py::none(),
        "Gradient of `combine` by weight: [num_keys].");
  m.def("merge_gradients", &Merge, py::arg("keys"), py::arg("grads"),
        "Unique keys and the sums of their gradients: ([num_unique], [num_unique, dim]).");
}

}  // namespace sok
