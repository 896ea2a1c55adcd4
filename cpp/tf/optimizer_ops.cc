// One optimizer step on the rows of a batch.
#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/apply.h"
#include "cpp/core/optimizer.h"
#include "cpp/tf/common.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("SokApplyGradients")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("grads: float")
    .Input("learning_rate: float")
    .Input("step: int64")
    .Attr("rule: string")
    .Attr("momentum: float = 0.0")
    .Attr("nesterov: bool = false")
    .Attr("lazy: bool = false")
    .Attr("momentum_before_rate: bool = false")
    .Attr("beta_1: float = 0.9")
    .Attr("beta_2: float = 0.999")
    .Attr("epsilon: float = 1e-7")
    .Attr("amsgrad: bool = false")
    .Attr("initial_accumulator: float = 0.1")
    .Attr("l1: float = 0.0")
    .Attr("l2: float = 0.0")
    .Attr("l2_shrinkage: float = 0.0")
    .Attr("learning_rate_power: float = -0.5")
    .Attr("beta: float = 0.0")
    .Attr("weight_decay: float = 0.0")
    .Attr("clip_value: float = 0.0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(4), 0, &unused));
      return absl::OkStatus();
    })
    .Doc(
        "Updates the rows of keys [num_keys] by grads [num_keys, dim]; equal keys are summed. "
        "`step` counts from 1.");

class ApplyGradientsOp : public OpKernel {
 public:
  explicit ApplyGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string rule;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rule", &rule));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("momentum", &options_.momentum));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nesterov", &options_.nesterov));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lazy", &options_.lazy));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("momentum_before_rate", &options_.momentum_before_rate));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("beta_1", &options_.beta_1));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("beta_2", &options_.beta_2));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &options_.epsilon));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("amsgrad", &options_.amsgrad));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initial_accumulator", &options_.initial_accumulator));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("l1", &options_.l1));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("l2", &options_.l2));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("l2_shrinkage", &options_.l2_shrinkage));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("learning_rate_power", &options_.learning_rate_power));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("beta", &options_.beta));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("weight_decay", &options_.weight_decay));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip_value", &options_.clip_value));
    OP_REQUIRES_OK(ctx, Guard([&] {
                     options_.kind = ParseOptimizerKind(rule);
                     options_.Validate();
                   }));
  }

  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor &keys = ctx->input(1), &grads = ctx->input(2);
    const int64_t n = keys.NumElements();
    OP_REQUIRES(
        ctx,
        grads.dims() == 2 && grads.dim_size(0) == n && grads.dim_size(1) == table->table().dim(),
        absl::InvalidArgumentError(absl::StrCat("gradients must have the shape [num_keys, dim] = [",
                                                n, ", ", table->table().dim(),
                                                "]. Received: ", grads.shape().DebugString(),
                                                " (table '", table->table().options().name, "')")));
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     ApplyGradients(ex, table->table(), options_, ctx->input(3).scalar<float>()(),
                                    ctx->input(4).scalar<int64_t>()(), Keys(keys),
                                    grads.flat<float>().data(), n);
                   }));
  }

 private:
  OptimizerOptions options_;
};
REGISTER_KERNEL_BUILDER(Name("SokApplyGradients").Device(tensorflow::DEVICE_CPU), ApplyGradientsOp);

}  // namespace sok
