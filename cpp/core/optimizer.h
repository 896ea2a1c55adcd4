// Optimizer rules.   (interface; rule structs and the essay are to be written)
#ifndef SOK_CORE_OPTIMIZER_H_
#define SOK_CORE_OPTIMIZER_H_

#include <cstdint>
#include <string>

namespace sok {

enum class OptimizerKind { kSgd, kMomentum, kAdagrad, kRowWiseAdagrad, kAdam, kLazyAdam, kFtrl };
OptimizerKind ParseOptimizerKind(
    const std::string&
        name);  // "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl"

// Fixed for the life of a table's optimizer. Fields that a rule does not know are ignored.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kSgd;
  float momentum = 0.0f;  // kMomentum
  bool nesterov = false;  // kMomentum
  bool lazy = false;    // kMomentum: true touches only the rows of the batch (TF1's sparse kernel);
                        // false decays every row's momentum at every step (Keras)
  float beta_1 = 0.9f;  // kAdam, kLazyAdam
  float beta_2 = 0.999f;
  float epsilon =
      1e-7f;  // Adam: added to sqrt(v); Adagrad: inside the square root as Keras 3 does, 0 for TF1
  bool amsgrad = false;              // kAdam, kLazyAdam
  float initial_accumulator = 0.1f;  // kAdagrad, kRowWiseAdagrad, kFtrl
  float l1 = 0.0f;                   // kFtrl
  float l2 = 0.0f;
  float l2_shrinkage = 0.0f;
  float learning_rate_power = -0.5f;
  float beta = 0.0f;  // kFtrl
  float weight_decay =
      0.0f;  // decoupled, row *= 1 - weight_decay * learning_rate, every row at every step (Keras)
  float clip_value = 0.0f;  // 0: none; element-wise, on the summed gradient of a row
  void Validate() const;
  bool operator==(const OptimizerOptions& other) const;
};

}  // namespace sok

#endif  // SOK_CORE_OPTIMIZER_H_
