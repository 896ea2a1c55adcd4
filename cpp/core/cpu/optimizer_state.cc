#include "cpp/core/cpu/optimizer_state.h"

#include <algorithm>
#include <cmath>

#include "cpp/core/adam_series.h"

namespace sok {
namespace {

constexpr int64_t kBlock = 16;

// Not inlined: inside a loop over blocks, GCC would unroll these loops before it vectorises them.
template <typename Count>
__attribute__((noinline)) void ReplayBlock(const StepHistory::Factors& factors, int num_terms,
                                           float epsilon, const float* w, const float* m,
                                           const float* v, Count count, float* out) {
  const auto term = [&factors](int i) { return factors.terms[i]; };
  ReplaySeries<kBlock>(factors.row, term, num_terms, epsilon, w, m, v, count, out);
}

}  // namespace

OptimizerState::OptimizerState(const OptimizerOptions& options, int64_t dim)
    : options_(options),
      dim_(dim),
      beta_1_(AsWritten(options.beta_1)),
      beta_2_(AsWritten(options.beta_2)),
      history_(options),
      row_floats_(dim) {
  for (const SlotVariableSpec& slot : OptimizerSlots(options, dim)) {
    if (slot.name == "last_step") last_step_offset_ = row_floats_;
    row_floats_ += slot.width;
  }
}

void OptimizerState::Apply(float* row) const {
  const uint32_t last_step = LastStep(row);
  if (last_step == history_.num_steps()) return;
  const StepHistory::Factors factors = history_.Since(last_step);
  Replay(row, factors, row);
  const ReplayKind kind = history_.kind();
  if (kind != ReplayKind::kDecay) {
    float* const momentum = row + dim_;
    for (int64_t d = 0; d < dim_; ++d) momentum[d] *= factors.momentum;
  }
  if (kind != ReplayKind::kDecay && kind != ReplayKind::kMomentum) {
    float* const velocity = row + 2 * dim_;
    for (int64_t d = 0; d < dim_; ++d) velocity[d] *= factors.velocity;
  }
  SetLastStep(row, history_.num_steps());
}

void OptimizerState::Read(const float* row, float* embedding) const {
  const uint32_t last_step = LastStep(row);
  if (last_step == history_.num_steps()) {
    std::copy_n(row, dim_, embedding);
  } else {
    Replay(row, history_.Since(last_step), embedding);
  }
}

void OptimizerState::Replay(const float* row, const StepHistory::Factors& factors,
                            float* embedding) const {
  if (history_.kind() == ReplayKind::kAdamSteps) return ReplaySteps(row, embedding);
  const float* const momentum = row + dim_;
  if (history_.num_terms() == 0) {
    if (embedding == row && factors.row == 1.0f) return;
    for (int64_t d = 0; d < dim_; ++d) embedding[d] = row[d] * factors.row;
    return;
  }
  if (history_.kind() == ReplayKind::kMomentum) {
    // In TF1's formula the term contains the rate, and the momentum has the opposite sign.
    float scale = options_.nesterov ? options_.momentum : 1.0f;
    if (options_.momentum_before_rate) scale = -scale;
    const float term = scale * factors.terms[0];
    for (int64_t d = 0; d < dim_; ++d) embedding[d] = row[d] * factors.row + momentum[d] * term;
    return;
  }
  const float* const velocity = row + (history_.kind() == ReplayKind::kAmsgrad ? 3 : 2) * dim_;
  const int num_terms = history_.num_terms();
  int64_t d = 0;
  for (; d + kBlock <= dim_; d += kBlock) {
    ReplayBlock(factors, num_terms, options_.epsilon, row + d, momentum + d, velocity + d,
                std::integral_constant<int64_t, kBlock>{}, embedding + d);
  }
  if (d < dim_) {
    ReplayBlock(factors, num_terms, options_.epsilon, row + d, momentum + d, velocity + d, dim_ - d,
                embedding + d);
  }
}

void OptimizerState::ReplaySteps(const float* row, float* embedding) const {
  const uint32_t first = history_.FirstOwed(LastStep(row));
  const uint32_t now = history_.num_steps();
  const uint32_t end = std::min(now, first + history_.window());
  // Beyond the window only weight decay is left.
  const double rest = end < now ? history_.Since(end).row : 1.0;
  // Blocks on the stack: rows are brought up while a batch is half written, and nothing may throw.
  for (int64_t d = 0; d < dim_; d += kBlock) {
    WalkSteps<kBlock>(history_, first, end, rest, beta_1_, beta_2_, options_.epsilon, row + d,
                      row + dim_ + d, row + 2 * dim_ + d, std::min(kBlock, dim_ - d),
                      embedding + d);
  }
}

bool OptimizerState::HasDuplicates(const uint32_t* row_numbers, int64_t num_keys) {
  uint32_t largest = 0;
  for (int64_t k = 0; k < num_keys; ++k) largest = std::max(largest, row_numbers[k]);
  const size_t words = largest / 64 + 1;
  // Half as much again: with a growing table, it would otherwise be resized at every step.
  if (words > seen_.size()) seen_.resize(words + words / 2);
  uint64_t repeated = 0;
  for (int64_t k = 0; k < num_keys; ++k) {
    uint64_t& word = seen_[row_numbers[k] / 64];
    const uint64_t bit = uint64_t{1} << (row_numbers[k] % 64);
    repeated |= word & bit;
    word |= bit;
  }
  for (int64_t k = 0; k < num_keys; ++k) seen_[row_numbers[k] / 64] = 0;
  return repeated != 0;
}

}  // namespace sok
