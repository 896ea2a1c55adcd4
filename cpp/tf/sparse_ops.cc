// SparseTensors of a group of tables as samples, in one op.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/sparse_samples.h"
#include "cpp/tf/common.h"

namespace sok {
namespace {

REGISTER_OP("SokSparseSamples")
    .Input("indices: N * int64")
    .Input("keys: N * int64")
    .Input("weights: N * float")
    .Input("dense_shapes: N * int64")
    .Output("sorted_keys: N * int64")
    .Output("sorted_weights: N * float")
    .Output("row_splits: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_inputs() / 4;
      for (int i = 0; i < n; ++i) {
        ShapeHandle unused, dense_shape;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 2, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->MakeShapeFromShapeTensor(3 * n + i, &dense_shape));
        c->set_output(i, c->input(n + i));
        c->set_output(n + i, c->input(2 * n + i));
        tensorflow::shape_inference::DimensionHandle splits = c->UnknownDim();
        if (c->RankKnown(dense_shape) && c->Rank(dense_shape) > 0) {
          TF_RETURN_IF_ERROR(c->Add(c->Dim(dense_shape, 0), 1, &splits));
        }
        c->set_output(2 * n + i, c->Vector(splits));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Values of SparseTensors [batch, columns] in order of row and column, and row_splits "
        "[batch + 1]. Values that are in order pass as they are. Empty weights stay empty.");

absl::Status CheckShapes(const Tensor& indices, const Tensor& keys, const Tensor& weights,
                         const Tensor& dense_shape) {
  const int64_t num_keys = keys.NumElements();
  if (indices.shape() == TensorShape({num_keys, 2}) && dense_shape.NumElements() == 2 &&
      (weights.NumElements() == 0 || weights.NumElements() == num_keys)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a SparseTensor of keys must have two axes, and an index and a weight for each key. "
      "Received: indices ",
      indices.shape().DebugString(), ", values ", keys.shape().DebugString(), ", weights ",
      weights.shape().DebugString(), ", a dense shape of ", dense_shape.NumElements(), " axes"));
}

// The values of entries in `order`; unchanged if that is empty.
template <typename T>
absl::Status InOrder(const Tensor& values, const std::vector<int64_t>& order, int i,
                     OpOutputList* sorted) {
  if (order.empty() || values.NumElements() == 0) {
    sorted->set(i, values);
    return absl::OkStatus();
  }
  Tensor* out;
  TF_RETURN_IF_ERROR(sorted->allocate(i, values.shape(), &out));
  const T* const from = values.flat<T>().data();
  std::transform(order.begin(), order.end(), out->flat<T>().data(),
                 [from](int64_t k) { return from[k]; });
  return absl::OkStatus();
}

absl::Status SortSamples(OpKernelContext* ctx) {
  OpInputList indices, keys, weights, dense_shapes;
  OpOutputList sorted_keys, sorted_weights, row_splits;
  TF_RETURN_IF_ERROR(GetLists(ctx,
                              {{"indices", &indices},
                               {"keys", &keys},
                               {"weights", &weights},
                               {"dense_shapes", &dense_shapes}},
                              {{"sorted_keys", &sorted_keys},
                               {"sorted_weights", &sorted_weights},
                               {"row_splits", &row_splits}}));
  const int n = keys.size();
  std::vector<int64_t> num_keys(n), batches(n);
  std::vector<int64_t*> splits(n);
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(CheckShapes(indices[i], keys[i], weights[i], dense_shapes[i]));
    num_keys[i] = keys[i].NumElements();
    batches[i] = std::max<int64_t>(0, dense_shapes[i].flat<int64_t>()(0));
    Tensor* out;
    TF_RETURN_IF_ERROR(row_splits.allocate(i, TensorShape({batches[i] + 1}), &out));
    splits[i] = out->flat<int64_t>().data();
  }
  std::vector<std::vector<int64_t>> orders(n);
  TF_RETURN_IF_ERROR(ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
    orders[i] =
        SparseSamples(inner, indices[i].flat<int64_t>().data(), num_keys[i], batches[i], splits[i]);
  }));
  for (int i = 0; i < n; ++i) {
    TF_RETURN_IF_ERROR(InOrder<int64_t>(keys[i], orders[i], i, &sorted_keys));
    TF_RETURN_IF_ERROR(InOrder<float>(weights[i], orders[i], i, &sorted_weights));
  }
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokSparseSamples").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<SortSamples>);

}  // namespace
}  // namespace sok
