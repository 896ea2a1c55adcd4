// One optimizer step on the rows of a batch, for all tables that make the same step.
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/tf/optimizer_op.h"

namespace sok {
namespace {

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
        "Makes the same optimizer step in N different tables: updates the rows of keys [num_keys] "
        "with grads [num_keys, dim]. The gradients of equal keys are summed; `keys_are_unique` "
        "says that no table has equal keys. `step` counts from 1. If the op fails, no table has "
        "made the step.");

struct HostStep {
  static absl::Status Apply(OpKernelContext* ctx, const std::vector<HostTablePtr>&,
                            const std::vector<TableGradients>& batches,
                            const OptimizerOptions& options, float learning_rate, int64_t step,
                            bool keys_are_unique) {
    TfExecutor ex(ctx);
    return Guard(
        [&] { ApplyGradients(ex, batches, options, learning_rate, step, keys_are_unique); });
  }
};
using HostOptimizerOp = OptimizerOp<HostTableResource, TableGradients, HostStep>;
REGISTER_KERNEL_BUILDER(Name("SokApplyGradients").Device(tensorflow::DEVICE_CPU), HostOptimizerOp);

}  // namespace
}  // namespace sok
