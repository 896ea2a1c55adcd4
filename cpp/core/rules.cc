#include "cpp/core/rules.h"

#include <stdexcept>
#include <string>

namespace sok {

void CheckStep(const OptimizerOptions& options, float learning_rate, int64_t step) {
  options.Validate();
  const bool ftrl = options.kind == OptimizerKind::kFtrl;
  if (!std::isfinite(learning_rate) || (ftrl && learning_rate <= 0.0f)) {
    throw std::invalid_argument("`learning_rate` must be a finite " +
                                std::string(ftrl ? "positive " : "") +
                                "number. Received: " + std::to_string(learning_rate));
  }
  if (step < 1) {
    throw std::invalid_argument("`step` counts from 1. Received: " + std::to_string(step));
  }
  if (!(1.0 - AsWritten(options.weight_decay) * learning_rate > 0.0)) {
    throw std::invalid_argument(
        "`weight_decay * learning_rate` must be below 1. Received: weight_decay=" +
        std::to_string(options.weight_decay) + ", learning_rate=" + std::to_string(learning_rate));
  }
}

}  // namespace sok
