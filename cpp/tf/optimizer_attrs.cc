#include "cpp/tf/optimizer_attrs.h"

#include <string>

namespace sok {

absl::Status ReadOptimizer(OpKernelConstruction* ctx, OptimizerOptions* options) {
  std::string rule;
  TF_RETURN_IF_ERROR(ctx->GetAttr("rule", &rule));
  TF_RETURN_IF_ERROR(ctx->GetAttr("momentum", &options->momentum));
  TF_RETURN_IF_ERROR(ctx->GetAttr("nesterov", &options->nesterov));
  TF_RETURN_IF_ERROR(ctx->GetAttr("lazy", &options->lazy));
  TF_RETURN_IF_ERROR(ctx->GetAttr("momentum_before_rate", &options->momentum_before_rate));
  TF_RETURN_IF_ERROR(ctx->GetAttr("beta_1", &options->beta_1));
  TF_RETURN_IF_ERROR(ctx->GetAttr("beta_2", &options->beta_2));
  TF_RETURN_IF_ERROR(ctx->GetAttr("epsilon", &options->epsilon));
  TF_RETURN_IF_ERROR(ctx->GetAttr("amsgrad", &options->amsgrad));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_weight_decay", &options->row_weight_decay));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initial_accumulator", &options->initial_accumulator));
  TF_RETURN_IF_ERROR(ctx->GetAttr("decay_steps", &options->decay_steps));
  TF_RETURN_IF_ERROR(ctx->GetAttr("decay_rate", &options->decay_rate));
  TF_RETURN_IF_ERROR(ctx->GetAttr("l1", &options->l1));
  TF_RETURN_IF_ERROR(ctx->GetAttr("l2", &options->l2));
  TF_RETURN_IF_ERROR(ctx->GetAttr("l2_shrinkage", &options->l2_shrinkage));
  TF_RETURN_IF_ERROR(ctx->GetAttr("learning_rate_power", &options->learning_rate_power));
  TF_RETURN_IF_ERROR(ctx->GetAttr("beta", &options->beta));
  TF_RETURN_IF_ERROR(ctx->GetAttr("weight_decay", &options->weight_decay));
  TF_RETURN_IF_ERROR(ctx->GetAttr("clip_value", &options->clip_value));
  return Guard([&] {
    options->kind = ParseOptimizerKind(rule);
    options->Validate();
  });
}

}  // namespace sok
