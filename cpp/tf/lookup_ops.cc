// The lookup of one process: all tables of a group in one op, no exchange, and its gradient.
#include <vector>

#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cpu/route.h"
#include "cpp/tf/common.h"
#include "cpp/tf/samples.h"

namespace sok {
namespace {

REGISTER_OP("SokLookup")
    .Input("handles: N * resource")
    .Input("keys: N * int64")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("embeddings: N * float")
    .Output("unique_keys: N * int64")
    .Output("inverse: N * uint32")
    .Output("key_rows: N * float")
    .Attr("N: int >= 1")
    .Attr("table_names: list(string)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .Attr("max_hotness: list(int)")
    .Attr("key_limits: list(int)")
    .Attr("batch_multiples: list(int)")
    .Attr("insert: bool")
    .Attr("keep_rows: list(bool) = []")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetEmbeddingShapes(c, /*keys=*/"keys", /*row_splits=*/"row_splits"));
      std::vector<ShapeHandle> keys;
      TF_RETURN_IF_ERROR(c->input("keys", &keys));
      bool insert;
      TF_RETURN_IF_ERROR(c->GetAttr("insert", &insert));
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      const int n = keys.size();
      for (int i = 0; i < n; ++i) {
        c->set_output(n + i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(2 * n + i, insert ? keys[i] : c->Vector(InferenceContext::kUnknownDim));
        c->set_output(3 * n + i, c->Matrix(InferenceContext::kUnknownDim, dims[i]));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Flat keys [num_keys] of N tables, as samples by row_splits [batch + 1] where a table's "
        "combiner is not 'none', to embeddings [batch, dim] or [num_keys, dim]. Empty weights "
        "mean ones. Without `insert`, unique_keys and inverse may be empty: SokUniqueKeys gives "
        "them. key_rows [num_keys, dim] is the row of each key for tables with keep_rows, which "
        "the gradient of weights needs; otherwise it has no rows.");

class LookupOp : public FeatureOp {
 public:
  explicit LookupOp(OpKernelConstruction* ctx) : FeatureOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<HostTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    FeatureInputs in;
    OpOutputList embeddings;
    OP_REQUIRES_OK(ctx, in.Get(ctx));
    OP_REQUIRES_OK(ctx, GetLists(ctx, {}, {{"embeddings", &embeddings}}));
    TfExecutor ex(ctx);
    const OpInputList& keys = in.keys;
    const int n = keys.size();
    // Every table's batch is checked before the first table changes.
    OP_REQUIRES_OK(ctx, features_.Check(ex, in));
    std::vector<int64_t> num_unique(n);  // at most
    for (int i = 0; insert_ && i < n; ++i) num_unique[i] = keys[i].NumElements();
    UniqueOutputs unique;
    OP_REQUIRES_OK(ctx, unique.Allocate(ctx, num_unique));
    std::vector<float*> key_rows;
    OP_REQUIRES_OK(ctx, features_.MakeKeyRows(ctx, in, &key_rows));
    std::vector<FeatureLookup> lookups(n);
    for (int i = 0; i < n; ++i) {
      FeatureLookup& lookup = lookups[i];
      lookup.samples =
          features_.MakeSamples(i, keys[i].NumElements(), in.row_splits[i], in.weights[i]);
      Tensor* out;
      OP_REQUIRES_OK(ctx, embeddings.allocate(i, features_.OutputShape(i, lookup.samples), &out));
      lookup.table = &tables[i]->table();
      lookup.keys = Keys(keys[i]);
      lookup.out = out->flat<float>().data();
      lookup.key_rows = key_rows[i];
      unique.Place(i, &lookup);
    }
    OP_REQUIRES_OK(ctx, Guard([&] { LookupGroup(ex, &lookups, insert_); }));
    OP_REQUIRES_OK(ctx, unique.Set(ctx, lookups));
  }

 private:
  bool insert_;
};
REGISTER_KERNEL_BUILDER(Name("SokLookup").Device(tensorflow::DEVICE_CPU), LookupOp);

REGISTER_OP("SokUniqueKeys")
    .Input("keys: N * int64")
    .Output("unique_keys: N * int64")
    .Output("inverse: N * uint32")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_inputs();
      for (int i = 0; i < n; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(n + i, c->input(i));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Each of keys [num_keys] once, and the place of each key among them, as SokLookup with "
        "`insert` gives them.");

absl::Status FindUniqueKeys(OpKernelContext* ctx) {
  OpInputList keys;
  OpOutputList unique_keys, inverse;
  TF_RETURN_IF_ERROR(
      GetLists(ctx, {{"keys", &keys}}, {{"unique_keys", &unique_keys}, {"inverse", &inverse}}));
  const int n = keys.size();
  std::vector<Tensor> unique(n);
  std::vector<int32_t*> places(n);
  std::vector<int64_t> num_keys(n), num_unique(n);
  for (int i = 0; i < n; ++i) {
    num_keys[i] = keys[i].NumElements();
    const TensorShape shape({num_keys[i]});
    TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, shape, &unique[i]));
    Tensor* place;
    TF_RETURN_IF_ERROR(inverse.allocate(i, shape, &place));
    places[i] = Places(place);
  }
  TF_RETURN_IF_ERROR(ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
    num_unique[i] = UniqueKeys(inner, Keys(keys[i]), num_keys[i], Keys(&unique[i]), places[i]);
  }));
  for (int i = 0; i < n; ++i) unique_keys.set(i, unique[i].Slice(0, num_unique[i]));
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokUniqueKeys").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<FindUniqueKeys>);

REGISTER_OP("SokLookupGrad")
    .Input("grads: N * float")
    .Input("unique_keys: N * int64")
    .Input("inverse: N * uint32")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("row_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      std::vector<ShapeHandle> unique;
      TF_RETURN_IF_ERROR(c->input("unique_keys", &unique));
      for (size_t i = 0; i < dims.size(); ++i) {
        c->set_output(i, c->Matrix(c->Dim(unique[i], 0), dims[i]));
      }
      return absl::OkStatus();
    })
    .Doc("Gradient of SokLookup's embeddings by unique key: [num_unique, dim] for each table.");

class LookupGradOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads, unique_keys;
    OpOutputList row_grads;
    std::vector<Samples> samples;
    OP_REQUIRES_OK(ctx, features_.GetGradients(ctx, &samples, &grads));
    OP_REQUIRES_OK(ctx,
                   GetLists(ctx, {{"unique_keys", &unique_keys}}, {{"row_grads", &row_grads}}));
    std::vector<int64_t> num_keys;
    std::vector<float*> outs;
    for (int i = 0; i < grads.size(); ++i) {
      num_keys.push_back(samples[i].num_keys);
      Tensor* out;
      const TensorShape shape({unique_keys[i].NumElements(), features_.dim(i)});
      OP_REQUIRES_OK(ctx, row_grads.allocate(i, shape, &out));
      outs.push_back(out->flat<float>().data());
    }
    OP_REQUIRES_OK(ctx, ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
                     CombineGradient(inner, samples[i], grads[i].flat<float>().data(),
                                     unique_keys[i].NumElements(), features_.dim(i), outs[i]);
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokLookupGrad").Device(tensorflow::DEVICE_CPU), LookupGradOp);

REGISTER_OP("SokWeightsGrad")
    .Input("grads: N * float")
    .Input("key_rows: N * float")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("weights_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      const int n = c->num_outputs();
      for (int i = 0; i < n; ++i) c->set_output(i, c->input(3 * n + i));
      return absl::OkStatus();
    })
    .Doc("Gradient of embeddings by the weights of the keys [num_keys] whose rows are key_rows.");

class WeightsGradOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads, key_rows, row_splits, weights;
    OpOutputList weights_grads;
    OP_REQUIRES_OK(ctx, GetLists(ctx,
                                 {{"grads", &grads},
                                  {"key_rows", &key_rows},
                                  {"row_splits", &row_splits},
                                  {"weights", &weights}},
                                 {{"weights_grads", &weights_grads}}));
    std::vector<int64_t> num_keys;
    std::vector<Samples> samples;
    std::vector<float*> outs;
    for (int i = 0; i < features_.size(); ++i) {
      num_keys.push_back(weights[i].NumElements());
      samples.push_back(features_.MakeSamples(i, num_keys[i], row_splits[i], weights[i]));
      OP_REQUIRES(ctx,
                  key_rows[i].shape() == TensorShape({num_keys[i], features_.dim(i)}) &&
                      grads[i].shape() == features_.OutputShape(i, samples[i]),
                  absl::InvalidArgumentError("the gradient of weights needs the row of each key"));
      Tensor* out;
      OP_REQUIRES_OK(ctx, weights_grads.allocate(i, weights[i].shape(), &out));
      outs.push_back(out->flat<float>().data());
    }
    OP_REQUIRES_OK(ctx, ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
                     const int64_t dim = features_.dim(i);
                     std::vector<const float*> rows(num_keys[i]);
                     const float* const first = key_rows[i].flat<float>().data();
                     for (int64_t k = 0; k < num_keys[i]; ++k) rows[k] = first + k * dim;
                     WeightGradient(inner, samples[i], rows.data(), grads[i].flat<float>().data(),
                                    dim, outs[i]);
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokWeightsGrad").Device(tensorflow::DEVICE_CPU), WeightsGradOp);

}  // namespace
}  // namespace sok
