// The last stage of a lookup of N processes: rows that came back from their owners, combined.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/message.h"
#include "cpp/tf/common.h"
#include "cpp/tf/row_layout.h"
#include "cpp/tf/samples.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("SokCombine")
    .Input("rows: float")
    .Input("splits: int32")
    .Input("counts: int64")
    .Input("inverse: N * int32")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("embeddings: N * float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) { return SetEmbeddingShapes(c, "inverse", "row_splits"); })
    .Doc("A received row message to embeddings [batch, dim] or [num_keys, dim] for each table.");

class CombineOp : public OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, features_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1), &counts = ctx->input(2);
    OpInputList inverse, row_splits, weights;
    OP_REQUIRES_OK(ctx, ctx->input_list("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    OpOutputList embeddings;
    OP_REQUIRES_OK(ctx, ctx->output_list("embeddings", &embeddings));
    const int64_t world_size = counts.dim_size(0);
    absl::Status status = Guard([&] {
      ThrowIfFailed(message.flat<float>().data(), splits.flat<int32_t>().data(), world_size);
    });
    // What an owner reports is a table that cannot take the batch's new keys.
    OP_REQUIRES(ctx, status.ok(), absl::ResourceExhaustedError(status.message()));
    const RowLayout layout(counts, features_);
    OP_REQUIRES_OK(ctx, layout.Check(message));
    TfExecutor ex(ctx);
    for (int i = 0; i < features_.size(); ++i) {
      const int64_t dim = features_.dim(i);
      std::vector<const float*> rows;
      rows.reserve(layout.num_unique(i));
      for (int64_t r = 0; r < world_size; ++r) {
        const float* row = message.flat<float>().data() + layout.start(r, i);
        for (int64_t k = 0; k < layout.count(r, i); ++k, row += dim) {
          rows.push_back(row);
        }
      }
      const Samples samples = features_.MakeSamples(i, inverse[i], row_splits[i], weights[i]);
      Tensor* out;
      OP_REQUIRES_OK(ctx, embeddings.allocate(i, features_.OutputShape(i, samples), &out));
      OP_REQUIRES_OK(ctx, Guard([&] {
                       CombineRows(ex, samples, rows.data(), rows.size(), dim,
                                   out->flat<float>().data());
                     }));
    }
  }

 private:
  FeatureAttrs features_;
};
REGISTER_KERNEL_BUILDER(Name("SokCombine").Device(tensorflow::DEVICE_CPU), CombineOp);

REGISTER_OP("SokCombineGrad")
    .Input("grads: N * float")
    .Input("counts: int64")
    .Input("inverse: N * int32")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Output("row_grads: float")
    .Attr("N: int >= 1")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc("Gradient of SokCombine by row, laid out as the row message it combined.");

class CombineGradOp : public OpKernel {
 public:
  explicit CombineGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, features_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads, inverse, row_splits, weights;
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    OP_REQUIRES_OK(ctx, ctx->input_list("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    const Tensor& counts = ctx->input(features_.size());
    const int64_t world_size = counts.dim_size(0);
    const RowLayout layout(counts, features_);
    Tensor* message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({layout.num_words()}), &message));
    float* out = message->flat<float>().data();
    for (int64_t r = 0; r < world_size; ++r) out[layout.start(r, 0) - 1] = 0.0f;
    TfExecutor ex(ctx);
    std::vector<float> by_key;
    for (int i = 0; i < features_.size(); ++i) {
      const int64_t dim = features_.dim(i), num_unique = layout.num_unique(i);
      const Samples samples = features_.MakeSamples(i, inverse[i], row_splits[i], weights[i]);
      OP_REQUIRES_OK(ctx, features_.CheckGradient(i, samples, grads[i]));
      by_key.resize(num_unique * dim);
      OP_REQUIRES_OK(ctx, Guard([&] {
                       CombineGradient(ex, samples, grads[i].flat<float>().data(), num_unique, dim,
                                       by_key.data());
                     }));
      const float* from = by_key.data();
      for (int64_t r = 0; r < world_size; ++r) {
        const int64_t words = layout.count(r, i) * dim;
        std::memcpy(out + layout.start(r, i), from, words * sizeof(float));
        from += words;
      }
    }
  }

 private:
  FeatureAttrs features_;
};
REGISTER_KERNEL_BUILDER(Name("SokCombineGrad").Device(tensorflow::DEVICE_CPU), CombineGradOp);

}  // namespace sok
