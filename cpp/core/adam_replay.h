// StepHistory: the steps that idle rows missed. Dense optimizers at the cost of the rows touched.
//
// Adam on a dense variable changes every row at every step: the moments of a row without gradient
// decay, and its remaining momentum still moves it. Here each row stores `last_step`, the step s
// that it is up to date with. The missed steps s+1..n are replayed when the row is next read or
// updated. With m, v the moments at s, b = sqrt(beta_2), j = k - s:
//
//     m_k = m beta_1^j      v_k = v beta_2^j
//     w_n = w - sum_k alpha_k m_k / (sqrt(v_k) + eps)
//
// The missed steps are not replayed one at a time. With D = sqrt(v) + eps, q = sqrt(v) / D < 1,
//
//     1 / (sqrt(v) b^j + eps) = 1 / (D (1 - q (1 - b^j))) = 1/D sum_i q^i (1 - b^j)^i
//     w_n = w - m/D sum_i q^i F_i(s, n)       F_i(s, n) = sum_k alpha_k beta_1^j (1 - b^j)^i
//
// F_i does not depend on the row: it is the same for all rows with the same s. beta_1^j vanishes
// long before b^j is far from 1, so few terms suffice (5 for 0.9 and 0.999). Their number is chosen
// from the betas so that the cut-off part stays below 1e-8 of F_0. If 16 terms do not suffice
// (beta_2 far below 1), the steps are replayed one at a time until beta_1^j vanishes.
//
// Weight decay multiplies the row by d_k = 1 - weight_decay * lr_k before the update of step k.
// Then w_n = w P(s, n) - ..., and each summand of F_i is multiplied by P(k, n), where
// P(s, n) = d_(s+1) ... d_n. Momentum is the case of one term: D = 1, alpha_k = 1 or lr_k.
//
//     step           s = n-K ........ n-W ........ n        K = 65,536 steps kept, W the window
//     F_i(s, .)      |--- frozen -----|- growing -|         in which beta_1^j > 1e-12
//
// Each new step adds one summand to the W growing records (a loop over W times the number of
// terms: 1 us for beta_1 = 0.9). Records older than K steps are computed on demand from the whole
// history, which is kept as runs of equal learning rate.
//
// Invariant: after Append, Since(s) covers exactly the steps s+1..num_steps().
// Const calls may run concurrently; the others need exclusive access.
#ifndef SOK_CORE_ADAM_REPLAY_H_
#define SOK_CORE_ADAM_REPLAY_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpp/core/optimizer.h"

namespace sok {

// What a row owes for steps it was not part of.
enum class ReplayKind {
  kNothing,   // the rule touches the rows of the batch only
  kDecay,     // weight decay
  kMomentum,  // decaying momentum, and weight decay
  kAmsgrad,   // as Adam, but divided by velocity_hat, which does not decay
  kAdam,      // both moments, as a series
  kAdamSteps  // both moments, step by step
};
ReplayKind ReplayKindOf(const OptimizerOptions& options);

class StepHistory {
 public:
  static constexpr int kMaxTerms = 16;
  static constexpr int64_t kKeptSteps = 65536;
  // If the learning rate changes at every step, each run is one step.
  static constexpr size_t kMaxRuns = 131072;
  static constexpr int64_t kSmallBytes = int64_t{1} << 20;

  // The factors that bring a row from step s to step n = num_steps().
  struct Factors {
    float row;               // P(s, n)
    float momentum;          // beta_1^(n - s)
    float velocity;          // beta_2^(n - s)
    float terms[kMaxTerms];  // F_i(s, n)
  };

  explicit StepHistory(const OptimizerOptions& options);

  ReplayKind kind() const { return kind_; }
  int num_terms() const { return num_terms_; }
  uint32_t num_steps() const { return base_ + num_kept_; }
  bool empty() const { return num_kept_ == 0; }
  // The first step that a row with this last_step owes. No row owes forgotten steps; new and
  // imported rows have a last_step of 0 and owe all steps since Forget.
  uint32_t FirstOwed(uint32_t last_step) const {
    return 1 + (last_step > base_ ? last_step : base_);
  }
  int64_t bytes() const;
  // The history is long, or takes more memory than the rows, `row_bytes`. The caller should bring
  // all rows up to date and call Forget: beside so many steps a pass over the rows costs little.
  bool IsLong(int64_t row_bytes) const {
    return runs_.size() >= kMaxRuns || bytes() > std::max(row_bytes, kSmallBytes);
  }
  // P over the steps that are not forgotten: the factor by which they scale an initial row.
  double decay() const;

  // Makes room for one more step: the Append that follows cannot fail for want of memory.
  void Reserve();
  // Adds step num_steps() + 1. `step` is t of Adam's bias correction.
  // Throws std::invalid_argument if weight_decay * learning_rate reaches 1.
  void Append(double learning_rate, int64_t step);
  // Call it when every row is up to date. Frees memory; the numbers of steps continue.
  void Forget();

  Factors Since(uint32_t last_step) const;

  // alpha_k and d_k, for kAdamSteps. O(log of the number of runs) beyond the kept steps.
  double Alpha(uint32_t k) const;
  double Decay(uint32_t k) const;
  uint32_t window() const { return window_; }  // missed steps whose momentum still counts

  // For the copy of the records in device memory, to which each Append is applied separately.
  const std::vector<double>& shape() const { return shape_; }  // [window, num_terms], see below
  double log_decay() const { return LogDecay(num_kept_); }     // log P(0, n)

 private:
  // Steps first, first + 1, ... with one learning rate and consecutive t.
  struct Run {
    uint32_t first;
    double learning_rate;
    int64_t step;       // t of `first`
    double log_before;  // log P(0, first - 1)
  };

  double AlphaOf(double learning_rate, int64_t step) const;
  // From here on, k and s count from base_.
  const Run& RunOf(uint32_t k) const;
  double LogDecay(uint32_t k) const;  // log P(0, k)
  void ComputeTerms(uint32_t s, double* terms) const;

  ReplayKind kind_;
  double beta_1_ = 0.0;  // or the momentum
  double beta_2_ = 0.0;
  double weight_decay_ = 0.0;
  bool rate_in_alpha_ = false;
  bool bias_correction_ = false;
  int num_terms_ = 0;
  uint32_t window_ = 0;

  uint32_t base_ = 0;  // steps forgotten
  uint32_t num_kept_ = 0;
  std::vector<Run> runs_;
  std::vector<double> shape_;        // [window, num_terms] beta_1^j (1 - b^j)^i, j descending to 1
  std::vector<double> terms_;        // [kept, num_terms] F_i of step s at s mod kKeptSteps
  std::vector<double> log_decay_;    // [kept] log P(0, s)
  std::vector<double> alpha_;        // [kept]
  std::vector<double> base_terms_;   // [num_terms] F_i(0, .): of rows with last_step <= base_
  std::vector<float> beta_1_power_;  // [0..] until it vanishes
  std::vector<float> beta_2_power_;  // [0..kKeptSteps]
};

}  // namespace sok

#endif  // SOK_CORE_ADAM_REPLAY_H_
