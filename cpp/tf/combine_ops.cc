// The last stage of a lookup of N processes: combines the rows that came back from their owners.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/row_layout.h"
#include "cpp/tf/samples.h"

namespace sok {

namespace {

std::vector<int64_t> NumKeys(const std::vector<Samples>& samples) {
  std::vector<int64_t> num_keys;
  for (const Samples& of_table : samples) num_keys.push_back(of_table.num_keys);
  return num_keys;
}

}  // namespace

REGISTER_OP("SokCombine")
    .Input("rows: float")
    .Input("splits: int32")
    .Input("counts: int64")
    .Input("inverse: N * uint32")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Input("call: int64")
    .Input("starts: int64")
    .Output("embeddings: N * float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) { return SetEmbeddingShapes(c, "inverse", "row_splits"); })
    .Doc(
        "A received row message to embeddings [batch, dim] or [num_keys, dim] for each table. call "
        "is what SokCheckMessage gives for the message, so that one with a failure is not read. "
        "starts is that of SokRoute.");

class CombineOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1), &counts = ctx->input(2);
    const int64_t world_size = counts.dim_size(0);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size));
    const RowLayout layout(counts, features_.dims());
    OP_REQUIRES_OK(ctx, layout.Check(message));
    std::vector<Samples> samples;
    std::vector<float*> outs;
    OP_REQUIRES_OK(ctx, features_.GetSamples(ctx, &samples));
    OP_REQUIRES_OK(ctx, features_.MakeEmbeddings(ctx, samples, &outs));
    OP_REQUIRES_OK(ctx, ForEachTable(ctx, NumKeys(samples), [&](Executor& inner, int64_t i) {
                     const int64_t dim = features_.dim(i), num_unique = layout.num_rows(i);
                     const Scratch<const float*> rows(num_unique);
                     int64_t k = 0;
                     for (int64_t r = 0; r < world_size; ++r) {
                       const float* row = message.flat<float>().data() + layout.start(r, i);
                       const int64_t end = k + layout.count(r, i);
                       for (; k < end; ++k, row += dim) rows[k] = row;
                     }
                     CombineRows(inner, samples[i], rows.get(), num_unique, dim, outs[i]);
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokCombine").Device(tensorflow::DEVICE_CPU), CombineOp);

REGISTER_OP("SokCombineGrad")
    .Input("grads: N * float")
    .Input("counts: int64")
    .Input("inverse: N * uint32")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Input("call: int64")
    .Input("starts: int64")
    .Output("row_grads: float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc("Gradient of SokCombine by row, laid out as the row message it combined.");

class CombineGradOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads;
    std::vector<Samples> samples;
    OP_REQUIRES_OK(ctx, features_.GetGradients(ctx, &samples, &grads));
    const Tensor& counts = ctx->input(features_.size());
    const int64_t world_size = counts.dim_size(0);
    const RowLayout layout(counts, features_.dims());
    Tensor* message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({layout.num_words()}), &message));
    float* out = message->flat<float>().data();
    Call call;
    OP_REQUIRES_OK(ctx, GetCall(ctx, &call));
    for (int64_t r = 0; r < world_size; ++r) {
      WriteHead(call.At(Stage::kGradients), out + layout.head(r));
    }
    OP_REQUIRES_OK(ctx, ForEachTable(ctx, NumKeys(samples), [&](Executor& inner, int64_t i) {
                     const int64_t dim = features_.dim(i), num_unique = layout.num_rows(i);
                     const Scratch<float> by_key(num_unique * dim);
                     CombineGradient(inner, samples[i], grads[i].flat<float>().data(), num_unique,
                                     dim, by_key.get());
                     const float* from = by_key.get();
                     for (int64_t r = 0; r < world_size; ++r) {
                       const int64_t words = layout.count(r, i) * dim;
                       std::copy_n(from, words, out + layout.start(r, i));
                       from += words;
                     }
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokCombineGrad").Device(tensorflow::DEVICE_CPU), CombineGradOp);

}  // namespace sok
