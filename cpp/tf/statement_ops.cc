// Compares what ranks state of their optimizers and weights (sok_like/lookup/replicas.py).
//
//     statements    rate | step | sum, absolute sum of variable 0 | .. of variable 1 | ..
//       rank 0      0.01 |  2   |  0.3   4.0                      |
//       rank 1      0.01 |  2   |  0.7   4.1                      |    -> raises: variable 0
//
// One op, because TensorFlow builds two functions for each of its own assertions in every traced
// step.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpp/tf/common.h"

namespace sok {

REGISTER_OP("SokCompareStatements")
    .Input("statements: float")
    .Attr("compared: list(string)")
    .Attr("tolerance: float")
    .SetIsStateful()  // it may raise, so it must run
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Raises if statements [world_size, 2 + 2 * compared], one row per rank, differ between "
        "ranks by more than tolerance; the steps must be equal.");

class CompareStatementsOp : public OpKernel {
 public:
  explicit CompareStatementsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("compared", &compared_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tolerance", &tolerance_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& statements = ctx->input(0);
    const int64_t width = 2 + 2 * static_cast<int64_t>(compared_.size());
    OP_REQUIRES(ctx, statements.dims() == 2 && statements.dim_size(1) == width,
                absl::InvalidArgumentError(absl::StrCat("statements must be [world_size, ", width,
                                                        "]. Received: shape ",
                                                        statements.shape().DebugString())));
    OP_REQUIRES(ctx, !Differ(statements, 0, 0, tolerance_),
                absl::InvalidArgumentError(absl::StrCat(
                    "The learning rate must be the same on all ranks. Received, by rank: ",
                    ByRank(statements, 0))));
    OP_REQUIRES(ctx, !Differ(statements, 1, 1, 0.0f),
                absl::InvalidArgumentError(absl::StrCat(
                    "The optimizer's step must be the same on all ranks. Received, by rank: ",
                    ByRank(statements, 1))));
    for (int64_t i = 0; i < static_cast<int64_t>(compared_.size()); ++i) {
      const int64_t sum = 2 + 2 * i, size = sum + 1;
      OP_REQUIRES(
          ctx,
          !Differ(statements, sum, size, tolerance_) && !Differ(statements, size, size, tolerance_),
          absl::InvalidArgumentError(absl::StrCat(
              "Ordinary variables, and what layers learn from data by `adapt`, must start alike on "
              "all ranks and stay alike. To start alike, call `adapt` with the same data on all "
              "ranks, and broadcast variables: sok.callbacks.BroadcastVariables() in `fit`, "
              "dist_model_parallel.broadcast_variables in a loop. To stay alike, average their "
              "gradients: sok.OptimizerWrapper, dist_model_parallel.DistributedOptimizer or "
              "DistributedGradientTape. A stock optimizer averages nothing, and under Keras 3 "
              "neither does Horovod's DistributedOptimizer. Received: ",
              compared_[i], " with sums of absolute values, by rank: ", ByRank(statements, size))));
    }
  }

 private:
  // Whether a column differs between ranks by more than rounding errors, relative to column `size`;
  // false if one is NaN, which the model's own checks are for.
  static bool Differ(const Tensor& statements, int64_t column, int64_t size, float tolerance) {
    const auto of = statements.matrix<float>();
    if (statements.dim_size(0) == 0) return false;
    float low = of(0, column), high = low, largest = 0;
    for (int64_t r = 0; r < statements.dim_size(0); ++r) {
      if (std::isnan(of(r, column)) || std::isnan(of(r, size))) return false;
      low = std::min(low, of(r, column));
      high = std::max(high, of(r, column));
      largest = std::max(largest, std::abs(of(r, size)));
    }
    return high - low > tolerance * largest;
  }

  static std::string ByRank(const Tensor& statements, int64_t column) {
    std::vector<float> values;
    for (int64_t r = 0; r < statements.dim_size(0); ++r) {
      values.push_back(statements.matrix<float>()(r, column));
    }
    return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
  }

  std::vector<std::string> compared_;
  float tolerance_;
};
REGISTER_KERNEL_BUILDER(Name("SokCompareStatements").Device(tensorflow::DEVICE_CPU),
                        CompareStatementsOp);

}  // namespace sok
