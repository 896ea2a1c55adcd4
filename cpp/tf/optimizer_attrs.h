// The attributes of SokApplyGradients: a rule and its fixed numbers.
#ifndef SOK_TF_OPTIMIZER_ATTRS_H_
#define SOK_TF_OPTIMIZER_ATTRS_H_

#include "cpp/core/optimizer.h"
#include "cpp/tf/common.h"

namespace sok {

absl::Status ReadOptimizer(OpKernelConstruction* ctx, OptimizerOptions* options);

}  // namespace sok

#endif  // SOK_TF_OPTIMIZER_ATTRS_H_
