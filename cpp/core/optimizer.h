// Optimizer rules: what one step does to one row and its slot rows.
//
// A row and its slot rows are contiguous, so an update touches one place:
//
//     SGD                 [ row dim ]
//     Momentum            [ row dim | momentum dim ], TF1's [ row dim | accumulation dim ]
//     Adagrad             [ row dim | accumulator dim ]
//     RowWiseAdagrad      [ row dim | accumulator 1 ]
//     Adam, LazyAdam      [ row dim | momentum dim | velocity dim ]
//       amsgrad           [ row dim | momentum dim | velocity dim | velocity_hat dim ]
//     Ftrl                [ row dim | accumulator dim | linear dim ]
//     AdagradDecay        [ row dim | accumulator dim | decays dim ]
//     Rmsprop             [ row dim | momentum dim | mean_square dim ]
//     if rows owe steps   [ ...                                     | last_step 1 ]
//
// Each rule is a small struct that holds the numbers of one step; host and device code share it.
// `Update` of an element-wise rule updates one element `x`, whose slot values lie `dim`, `2 * dim`,
// ... floats behind it. RowWiseAdagradRule needs the whole row and gives the learning rate of it.
//
// Dense rules (Adam, momentum that is not lazy, weight decay) also change rows outside the batch.
// Such rows are not touched, but owe the step: see adam_replay.h.
//
// Cost: the arithmetic is cheap; most of the time goes into bringing the row into the cache.
#ifndef SOK_CORE_OPTIMIZER_H_
#define SOK_CORE_OPTIMIZER_H_

#include <cmath>
#include <cstdint>
#include <string>

#include "cpp/core/platform.h"

namespace sok {

enum class OptimizerKind {
  kSgd,
  kMomentum,
  kAdagrad,
  kRowWiseAdagrad,
  kAdam,
  kLazyAdam,
  kFtrl,
  kAdagradDecay,
  kRmsprop,
};
constexpr int kNumOptimizerKinds = static_cast<int>(OptimizerKind::kRmsprop) + 1;
// "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl", "adagrad_decay",
// "rmsprop"
OptimizerKind ParseOptimizerKind(const std::string& name);
std::string OptimizerName(OptimizerKind kind);

// Fixed for the life of a table's optimizer. Fields that a rule does not read are ignored.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kSgd;
  float momentum = 0.0f;  // kMomentum, in [0, 0.9995]
  bool nesterov = false;  // kMomentum
  // kMomentum: true changes only the rows of the batch (TF1's sparse kernel); false decays every
  // row's momentum at every step (Keras).
  bool lazy = false;
  // kMomentum: true is TF1's a = momentum a + g, w -= lr a; false Keras' v = momentum v - lr g,
  // w += v. They differ once the learning rate changes.
  bool momentum_before_rate = false;
  float beta_1 = 0.9f;  // kAdam, kLazyAdam, in [0, 0.9995]; kRmsprop, of its momentum
  float beta_2 = 0.999f;
  // Adam: added to sqrt(v). Adagrad: inside the square root as Keras 3 does, 0 for TF1.
  // RowWiseAdagrad: added to the square root, as FBGEMM does. Rmsprop: inside it, as TF1 does.
  float epsilon = 1e-7f;
  bool amsgrad = false;  // kAdam, kLazyAdam
  // kLazyAdam without amsgrad: the rows of the batch *= 1 - row_weight_decay * alpha before the
  // update (DeepRec's AdamW on its EmbeddingVariables).
  float row_weight_decay = 0.0f;
  float initial_accumulator = 0.1f;  // kAdagrad, kRowWiseAdagrad, kFtrl, kAdagradDecay
  int64_t decay_steps = 100000;      // kAdagradDecay: steps between two decays of accumulators
  float decay_rate = 0.9f;           // kAdagradDecay, in (0, 1)
  float l1 = 0.0f;                   // kFtrl
  float l2 = 0.0f;
  float l2_shrinkage = 0.0f;
  float learning_rate_power = -0.5f;
  float beta = 0.0f;  // kFtrl
  // Decoupled: row *= 1 - weight_decay * learning_rate, every row at every step, before the
  // update (Keras).
  float weight_decay = 0.0f;
  float clip_value = 0.0f;  // 0: none; element-wise, on the summed gradient of a row

  // Calls f(name, field, kinds) for every field except `kind`. `options` may be const. Bit
  // 1 << kind of `kinds` is set for each rule that reads the field.
  template <typename Options, typename F>
  static void ForEachField(Options& options, F&& f) {
    const auto bit = [](OptimizerKind kind) { return 1 << static_cast<int>(kind); };
    const int momentum = bit(OptimizerKind::kMomentum), rmsprop = bit(OptimizerKind::kRmsprop);
    const int adam = bit(OptimizerKind::kAdam) | bit(OptimizerKind::kLazyAdam);
    const int adagrad = bit(OptimizerKind::kAdagrad) | bit(OptimizerKind::kRowWiseAdagrad);
    const int decay = bit(OptimizerKind::kAdagradDecay), ftrl = bit(OptimizerKind::kFtrl);
    f("momentum", options.momentum, momentum);
    f("nesterov", options.nesterov, momentum);
    f("lazy", options.lazy, momentum);
    f("momentum_before_rate", options.momentum_before_rate, momentum);
    f("beta_1", options.beta_1, adam | rmsprop);
    f("beta_2", options.beta_2, adam | rmsprop);
    f("epsilon", options.epsilon, adam | rmsprop | adagrad);
    f("amsgrad", options.amsgrad, adam);
    f("row_weight_decay", options.row_weight_decay, options.row_weight_decay > 0.0f ? adam : 0);
    f("initial_accumulator", options.initial_accumulator, adagrad | decay | ftrl);
    f("decay_steps", options.decay_steps, decay);
    f("decay_rate", options.decay_rate, decay);
    f("l1", options.l1, ftrl);
    f("l2", options.l2, ftrl);
    f("l2_shrinkage", options.l2_shrinkage, ftrl);
    f("learning_rate_power", options.learning_rate_power, ftrl);
    f("beta", options.beta, ftrl);
    f("weight_decay", options.weight_decay, ~0);
    f("clip_value", options.clip_value, ~0);
  }
  // Throws std::invalid_argument naming the field, the requirement and the value.
  void Validate() const;
  bool operator==(const OptimizerOptions& other) const;
  bool operator!=(const OptimizerOptions& other) const { return !(*this == other); }
  // Kind and the fields its rule reads: "adam(beta_1=0.9, ...)". 9 digits identify a float exactly.
  std::string ToString(int digits = 7) const;
};

// Throws std::invalid_argument unless the options are valid, `learning_rate` fits the rule and
// `step` counts from 1.
void CheckStep(const OptimizerOptions& options, float learning_rate, int64_t step);

// The decimal number that a float option was written as: 0.999f is 0.99900001287, so 1 - 0.999f has
// a relative error of 1e-5. Rules use the nearest number of 7 digits instead.
double AsWritten(float value);

// Clipped to [-clip_value, clip_value]; NaN stays NaN.
SOK_HD inline float Clip(float value, float clip_value) {
  const float low = value < -clip_value ? -clip_value : value;
  return clip_value < low ? clip_value : low;
}

// w -= lr g
struct SgdRule {
  static constexpr int kSlots = 0;
  float learning_rate;

  SOK_HD void Update(float g, float* x, int64_t) const { x[0] -= learning_rate * g; }
};

// Keras: v = momentum v - lr g; w += v, or with nesterov w += momentum v - lr g.
// TF1:   a = momentum a + g; w -= lr a, or with nesterov w -= lr g + lr momentum a.
// Both are v = momentum v + before g; w += after v + direct g.
struct MomentumRule {
  static constexpr int kSlots = 1;
  float momentum;
  float before;  // -lr (Keras) or 1 (TF1)
  float after;   // 1 or -lr, times momentum with nesterov
  float direct;  // -lr with nesterov, else 0

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float v = momentum * x[dim] + before * g;
    x[dim] = v;
    // Without nesterov `direct` is 0, and 0 times an infinite g would be NaN.
    x[0] += direct == 0.0f ? after * v : after * v + direct * g;
  }
};

// acc += g^2; w -= lr g / sqrt(acc + epsilon)   (Duchi et al., 2011; epsilon placed as in Keras)
struct AdagradRule {
  static constexpr int kSlots = 1;
  float learning_rate;
  float epsilon;

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float accumulator = x[dim] + g * g;
    x[dim] = accumulator;
    x[0] -= learning_rate * g / std::sqrt(accumulator + epsilon);
  }
};

// At the first update of a row after each `decay_steps` steps: acc = max(decay_rate acc, initial).
// Then as Adagrad, without epsilon. A row that missed several decays catches up on one per update.
// (DeepRec's AdagradDecay)
struct AdagradDecayRule {
  static constexpr int kSlots = 2;
  float learning_rate;
  float decay_rate;
  float initial_accumulator;
  float due;  // decays that every row should have had by this step

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    float accumulator = x[dim];
    if (due > x[2 * dim]) {
      const float decayed = accumulator * decay_rate;
      accumulator = decayed < initial_accumulator ? initial_accumulator : decayed;
      x[2 * dim] += 1.0f;
    }
    accumulator += g * g;
    x[dim] = accumulator;
    x[0] -= learning_rate * g / std::sqrt(accumulator);
  }
};

// acc += mean(g^2) over the row; w -= lr g / (sqrt(acc) + epsilon)   (as FBGEMM defines it)
struct RowWiseAdagradRule {
  float learning_rate;
  float epsilon;

  SOK_HD float Rate(float sum_of_squares, float* accumulator, int64_t dim) const {
    *accumulator += sum_of_squares / static_cast<float>(dim);
    return learning_rate / (std::sqrt(*accumulator) + epsilon);
  }
};

// m += (1 - beta_1) (g - m); v += (1 - beta_2) (g^2 - v); w -= alpha m / (sqrt(v) + epsilon)
// with alpha = lr sqrt(1 - beta_2^t) / (1 - beta_1^t)   (Kingma and Ba, 2015, end of section 2)
struct AdamRule {
  static constexpr int kSlots = 2;
  float alpha;
  float one_minus_beta_1;
  float one_minus_beta_2;
  float epsilon;

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float m = x[dim] + one_minus_beta_1 * (g - x[dim]);
    const float v = x[2 * dim] + one_minus_beta_2 * (g * g - x[2 * dim]);
    x[dim] = m;
    x[2 * dim] = v;
    x[0] -= alpha * m / (std::sqrt(v) + epsilon);
  }
};

// w *= keep, then Adam: decoupled weight decay of the rows in the batch   (Loshchilov and Hutter,
// 2019; DeepRec's w -= alpha (m / (sqrt(v) + epsilon) + weight_decay w))
struct AdamWRule {
  static constexpr int kSlots = 2;
  AdamRule adam;
  float keep;  // 1 - weight_decay alpha

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    x[0] *= keep;
    adam.Update(g, x, dim);
  }
};

// v += (1 - beta_2) (g^2 - v); m = beta_1 m + lr g / sqrt(v + epsilon); w -= m
// (Tieleman and Hinton, 2012, with momentum as in TF1)
struct RmspropRule {
  static constexpr int kSlots = 2;
  float learning_rate;
  float beta_1;
  float one_minus_beta_2;
  float epsilon;

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float v = x[2 * dim] + one_minus_beta_2 * (g * g - x[2 * dim]);
    const float m = beta_1 * x[dim] + learning_rate * g / std::sqrt(v + epsilon);
    x[dim] = m;
    x[2 * dim] = v;
    x[0] -= m;
  }
};

// Adam with v replaced in the last line by the largest v so far   (Reddi et al., 2018; Keras)
struct AmsgradRule {
  static constexpr int kSlots = 3;
  AdamRule adam;

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float m = x[dim] + adam.one_minus_beta_1 * (g - x[dim]);
    const float v = x[2 * dim] + adam.one_minus_beta_2 * (g * g - x[2 * dim]);
    const float v_hat = v > x[3 * dim] ? v : x[3 * dim];
    x[dim] = m;
    x[2 * dim] = v;
    x[3 * dim] = v_hat;
    x[0] -= adam.alpha * m / (std::sqrt(v_hat) + adam.epsilon);
  }
};

// FTRL-proximal with shrinkage as in TF's FtrlV2; `l2` includes beta / (2 lr).
//     n = acc + g^2; sigma = (n^-p - acc^-p) / lr; linear += g + 2 l2_shrinkage w - sigma w
//     w = (clip(linear, l1) - linear) / (n^-p / lr + 2 l2); acc = n
// (McMahan et al., 2013, Algorithm 1)
template <bool kSquareRoot>  // learning_rate_power p == -0.5
struct FtrlRule {
  static constexpr int kSlots = 2;
  float learning_rate;
  float l1;
  float l2;
  float l2_shrinkage;
  float minus_power;

  SOK_HD float Power(float x) const {
    return kSquareRoot ? std::sqrt(x) : std::pow(x, minus_power);
  }

  SOK_HD void Update(float g, float* x, int64_t dim) const {
    const float accumulator = x[dim] + g * g;
    const float power = Power(accumulator);
    const float sigma = (power - Power(x[dim])) / learning_rate;
    const float linear = x[2 * dim] + (g + 2.0f * l2_shrinkage * x[0]) - sigma * x[0];
    const float quadratic = power / learning_rate + 2.0f * l2;
    x[dim] = accumulator;
    x[2 * dim] = linear;
    x[0] = (Clip(linear, l1) - linear) / quadratic;
  }
};

}  // namespace sok

#endif  // SOK_CORE_OPTIMIZER_H_
