// Makes the rule of one step from an optimizer's options, for every device.
//
// The numbers of a step (Adam's bias correction, Ftrl's share of beta) are computed here, in double
// where that matters, so that host and device make the same step.
#ifndef SOK_CORE_RULES_H_
#define SOK_CORE_RULES_H_

#include <cmath>
#include <cstdint>

#include "cpp/core/optimizer.h"

namespace sok {

inline MomentumRule MakeMomentumRule(const OptimizerOptions& options, float learning_rate) {
  MomentumRule rule;
  rule.momentum = options.momentum;
  rule.before = options.momentum_before_rate ? 1.0f : -learning_rate;
  rule.after = options.momentum_before_rate ? -learning_rate : 1.0f;
  if (options.nesterov) rule.after *= options.momentum;
  rule.direct = options.nesterov ? -learning_rate : 0.0f;
  return rule;
}

inline AdamRule MakeAdamRule(const OptimizerOptions& options, float learning_rate, int64_t step) {
  const double beta_1 = AsWritten(options.beta_1);
  const double beta_2 = AsWritten(options.beta_2);
  const double t = static_cast<double>(step);
  AdamRule rule;
  rule.alpha = static_cast<float>(learning_rate * std::sqrt(1.0 - std::pow(beta_2, t)) /
                                  (1.0 - std::pow(beta_1, t)));
  rule.one_minus_beta_1 = static_cast<float>(1.0 - beta_1);
  rule.one_minus_beta_2 = static_cast<float>(1.0 - beta_2);
  rule.epsilon = options.epsilon;
  return rule;
}

inline AdagradDecayRule MakeAdagradDecayRule(const OptimizerOptions& options, float learning_rate,
                                             int64_t step) {
  return {learning_rate, options.decay_rate, options.initial_accumulator,
          static_cast<float>(step / options.decay_steps)};
}

inline RmspropRule MakeRmspropRule(const OptimizerOptions& options, float learning_rate) {
  return {learning_rate, options.beta_1, static_cast<float>(1.0 - AsWritten(options.beta_2)),
          options.epsilon};
}

template <bool kSquareRoot>
FtrlRule<kSquareRoot> MakeFtrlRule(const OptimizerOptions& options, float learning_rate) {
  const float l2 = options.l2 + options.beta / (2.0f * learning_rate);
  return {learning_rate, options.l1, l2, options.l2_shrinkage, -options.learning_rate_power};
}

// Calls f(rule) with the struct of optimizer.h that `options` name.
template <typename F>
void WithRule(const OptimizerOptions& options, float learning_rate, int64_t step, F&& f) {
  switch (options.kind) {
    case OptimizerKind::kSgd:
      return f(SgdRule{learning_rate});
    case OptimizerKind::kMomentum:
      return f(MakeMomentumRule(options, learning_rate));
    case OptimizerKind::kAdagrad:
      return f(AdagradRule{learning_rate, options.epsilon});
    case OptimizerKind::kRowWiseAdagrad:
      return f(RowWiseAdagradRule{learning_rate, options.epsilon});
    case OptimizerKind::kAdam:
    case OptimizerKind::kLazyAdam: {
      const AdamRule rule = MakeAdamRule(options, learning_rate, step);
      if (options.row_weight_decay > 0.0f) {
        return f(AdamWRule{rule, 1.0f - options.row_weight_decay * rule.alpha});
      }
      return options.amsgrad ? f(AmsgradRule{rule}) : f(rule);
    }
    case OptimizerKind::kFtrl:
      return options.learning_rate_power == -0.5f ? f(MakeFtrlRule<true>(options, learning_rate))
                                                  : f(MakeFtrlRule<false>(options, learning_rate));
    case OptimizerKind::kAdagradDecay:
      return f(MakeAdagradDecayRule(options, learning_rate, step));
    case OptimizerKind::kRmsprop:
      return f(MakeRmspropRule(options, learning_rate));
  }
}

}  // namespace sok

#endif  // SOK_CORE_RULES_H_
