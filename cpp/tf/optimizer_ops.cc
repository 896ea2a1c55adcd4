// One optimizer step on the rows of a batch, of as many tables as take it alike.
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/optimizer.h"
#include "cpp/tf/common.h"
#include "cpp/tf/optimizer_attrs.h"

namespace sok {

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
    .Attr("row_weight_decay: float = 0.0")
    .Attr("initial_accumulator: float = 0.1")
    .Attr("decay_steps: int = 100000")
    .Attr("decay_rate: float = 0.9")
    .Attr("l1: float = 0.0")
    .Attr("l2: float = 0.0")
    .Attr("l2_shrinkage: float = 0.0")
    .Attr("learning_rate_power: float = -0.5")
    .Attr("beta: float = 0.0")
    .Attr("weight_decay: float = 0.0")
    .Attr("clip_value: float = 0.0")
    .Attr("keys_are_unique: bool = false")
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
        "[num_keys, dim]; equal keys are summed, where `keys_are_unique` does not say that no "
        "table "
        "has any. `step` counts from 1. Where it fails, no table has made the step.");

class ApplyGradientsOp : public OpKernel {
 public:
  explicit ApplyGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadOptimizer(ctx, &options_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keys_are_unique", &keys_are_unique_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<HostTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, grads;
    OP_REQUIRES_OK(ctx, GetLists(ctx, {{"keys", &keys}, {"grads", &grads}}));
    const int n = keys.size();
    std::vector<TableGradients> batches(n);
    for (int i = 0; i < n; ++i) {
      CpuTable& table = tables[i]->table();
      OP_REQUIRES_OK(ctx, CheckRowsShape("gradients", keys[i], grads[i], table.options()));
      batches[i] = {&table, Keys(keys[i]), grads[i].flat<float>().data(), keys[i].NumElements()};
    }
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     ApplyGradients(ex, batches, options_, ctx->input(3 * n).scalar<float>()(),
                                    ctx->input(3 * n + 1).scalar<int64_t>()(), keys_are_unique_);
                   }));
  }

 private:
  OptimizerOptions options_;
  bool keys_are_unique_;
};
REGISTER_KERNEL_BUILDER(Name("SokApplyGradients").Device(tensorflow::DEVICE_CPU), ApplyGradientsOp);

}  // namespace sok
