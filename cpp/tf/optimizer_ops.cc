// One optimizer step on the rows of a batch, of as many tables as take it alike.
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/apply.h"
#include "cpp/core/optimizer.h"
#include "cpp/tf/common.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("SokApplyGradients")
    .Input("handles: N * resource")
    .Input("keys: N * int64")
    .Input("grads: N * float")
    .Input("learning_rate: float")
    .Input("step: int64")
    .Attr("N: int >= 1")
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
      int n;
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      for (int i = 0; i < n; ++i) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(n + i), 1, &unused));
        TF_RETURN_IF_ERROR(c->WithRank(c->input(2 * n + i), 2, &unused));
      }
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3 * n), 0, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3 * n + 1), 0, &unused));
      return absl::OkStatus();
    })
    .Doc(
        "The same step on N different tables: updates a table's rows of keys [num_keys] by grads "
        "[num_keys, dim]; equal keys are summed. `step` counts from 1. Where it fails, no table "
        "has "
        "made the step.");

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
    std::vector<TablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    const int n = keys.size();
    std::vector<TableGradients> batches(n);
    for (int i = 0; i < n; ++i) {
      CpuTable& table = tables[i]->table();
      const int64_t num_keys = keys[i].NumElements();
      OP_REQUIRES(ctx, grads[i].shape() == TensorShape({num_keys, table.dim()}),
                  absl::InvalidArgumentError(absl::StrCat(
                      "gradients must have the shape [num_keys, dim] = [", num_keys, ", ",
                      table.dim(), "]. Received: ", grads[i].shape().DebugString(), " (table '",
                      table.options().name, "')")));
      batches[i] = {&table, Keys(keys[i]), grads[i].flat<float>().data(), num_keys};
    }
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     ApplyGradients(ex, batches, options_, ctx->input(3 * n).scalar<float>()(),
                                    ctx->input(3 * n + 1).scalar<int64_t>()());
                   }));
  }

 private:
  OptimizerOptions options_;
};
REGISTER_KERNEL_BUILDER(Name("SokApplyGradients").Device(tensorflow::DEVICE_CPU), ApplyGradientsOp);

}  // namespace sok
