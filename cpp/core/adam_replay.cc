#include "cpp/core/adam_replay.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace sok {
namespace {

constexpr double kWindowTail = 1e-12;  // of beta_1^j, relative to its start
// Replaying step by step, the denominator shrinks too: down to epsilon, which is small.
constexpr double kWalkTail = 1e-20;
constexpr double kSeriesTail = 1e-8;

uint32_t WindowOf(double beta, double tail) {
  if (beta <= 0.0) return 0;
  return static_cast<uint32_t>(std::ceil(std::log(tail) / std::log(beta)));
}

// Fewest terms of the series that keep the cut-off part below kSeriesTail of F_0; 0 if more than
// kMaxTerms. N terms miss (q x)^N / (1 - q x) <= x^N / b^j of 1 / (1 - q x), with x = 1 - b^j.
int SeriesTerms(double beta_1, double beta_2) {
  const double b = std::sqrt(beta_2);
  if (beta_1 >= b) return 0;
  const uint32_t window = WindowOf(beta_1 / b, kWindowTail);
  for (int num_terms = 1; num_terms <= StepHistory::kMaxTerms; ++num_terms) {
    double missed = 0.0;
    for (uint32_t j = 1; j <= window; ++j) {
      missed += std::pow(beta_1 / b, j) * std::pow(1.0 - std::pow(b, j), num_terms);
    }
    if (missed < kSeriesTail * beta_1 / (1.0 - beta_1)) return num_terms;
  }
  return 0;
}

}  // namespace

ReplayKind ReplayKindOf(const OptimizerOptions& options) {
  if (options.kind == OptimizerKind::kMomentum && !options.lazy) return ReplayKind::kMomentum;
  if (options.kind == OptimizerKind::kAdam) {
    if (options.amsgrad) return ReplayKind::kAmsgrad;
    if (options.beta_1 == 0.0f) return ReplayKind::kAdam;
    return SeriesTerms(AsWritten(options.beta_1), AsWritten(options.beta_2)) > 0
               ? ReplayKind::kAdam
               : ReplayKind::kAdamSteps;
  }
  return options.weight_decay > 0.0f ? ReplayKind::kDecay : ReplayKind::kNothing;
}

StepHistory::StepHistory(const OptimizerOptions& options)
    : kind_(ReplayKindOf(options)), weight_decay_(AsWritten(options.weight_decay)) {
  switch (kind_) {
    case ReplayKind::kNothing:
    case ReplayKind::kDecay:
      break;
    case ReplayKind::kMomentum:
      beta_1_ = AsWritten(options.momentum);
      rate_in_alpha_ = options.momentum_before_rate;
      num_terms_ = 1;
      break;
    case ReplayKind::kAmsgrad:
    case ReplayKind::kAdam:
    case ReplayKind::kAdamSteps:
      beta_1_ = AsWritten(options.beta_1);
      beta_2_ = AsWritten(options.beta_2);
      rate_in_alpha_ = true;
      bias_correction_ = true;
      num_terms_ = kind_ == ReplayKind::kAmsgrad ? 1
                   : kind_ == ReplayKind::kAdam  ? SeriesTerms(beta_1_, beta_2_)
                                                 : 0;
      break;
  }
  if (beta_1_ == 0.0) num_terms_ = 0;  // no momentum survives a step
  window_ = WindowOf(beta_1_, kind_ == ReplayKind::kAdamSteps ? kWalkTail : kWindowTail);
  shape_.resize(static_cast<size_t>(window_) * num_terms_);
  const double b = std::sqrt(beta_2_);
  for (uint32_t j = 1; j <= window_ && num_terms_ > 0; ++j) {
    double* shape = &shape_[static_cast<size_t>(window_ - j) * num_terms_];
    shape[0] = std::pow(beta_1_, j);
    for (int i = 1; i < num_terms_; ++i) shape[i] = shape[i - 1] * (1.0 - std::pow(b, j));
  }
  beta_1_power_.assign(1, 1.0f);
  beta_2_power_.assign(1, 1.0f);
  Forget();
}

void StepHistory::Forget() {
  // New vectors, because cleared ones would keep their memory. Made first, since that can throw.
  std::vector<double> terms(num_terms_), base_terms(num_terms_), log_decay(1), alpha(1);
  base_ += num_kept_;
  num_kept_ = 0;
  std::vector<Run>().swap(runs_);
  terms_.swap(terms);
  log_decay_.swap(log_decay);
  alpha_.swap(alpha);
  base_terms_.swap(base_terms);
}

double StepHistory::decay() const {
  return weight_decay_ > 0.0 && num_kept_ > 0 ? std::exp(LogDecay(num_kept_)) : 1.0;
}

int64_t StepHistory::bytes() const {
  const auto doubles = [](const std::vector<double>& values) {
    return values.capacity() * sizeof(double);
  };
  return static_cast<int64_t>(runs_.capacity() * sizeof(Run) + doubles(shape_) + doubles(terms_) +
                              doubles(log_decay_) + doubles(alpha_) + doubles(base_terms_) +
                              (beta_1_power_.capacity() + beta_2_power_.capacity()) *
                                  sizeof(float));
}

double StepHistory::AlphaOf(double learning_rate, int64_t step) const {
  if (!rate_in_alpha_) return 1.0;
  if (!bias_correction_) return learning_rate;
  const double t = static_cast<double>(step);
  return learning_rate * std::sqrt(1.0 - std::pow(beta_2_, t)) / (1.0 - std::pow(beta_1_, t));
}

void StepHistory::Reserve() {
  const auto reserve = [](auto& values, size_t more) {
    if (values.size() + more > values.capacity()) values.reserve(2 * values.capacity() + more);
  };
  reserve(runs_, 1);
  reserve(terms_, static_cast<size_t>(num_terms_));
  reserve(log_decay_, 1);
  reserve(alpha_, 1);
  reserve(beta_1_power_, 1);
  reserve(beta_2_power_, 1);
}

void StepHistory::Append(double learning_rate, int64_t step) {
  const double decay = 1.0 - weight_decay_ * learning_rate;
  if (!(decay > 0.0)) {
    throw std::invalid_argument(
        "`weight_decay * learning_rate` must be below 1. Received: weight_decay=" +
        std::to_string(weight_decay_) + ", learning_rate=" + std::to_string(learning_rate));
  }
  const double log_before = LogDecay(num_kept_);
  const uint32_t n = ++num_kept_;
  if (runs_.empty() || runs_.back().learning_rate != learning_rate ||
      runs_.back().step + (n - runs_.back().first) != step) {
    runs_.push_back({n, learning_rate, step, log_before});
  }
  const double alpha = AlphaOf(learning_rate, step);

  // Adds one summand for each s in [n - length, n); the records lie in order, but may wrap around.
  const int64_t length = std::min<int64_t>(window_, n);
  int64_t s = n - length;
  while (s < n && num_terms_ > 0) {
    const int64_t at = s % kKeptSteps;
    const int64_t count = std::min<int64_t>(n - s, kKeptSteps - at);
    double* const terms = &terms_[at * num_terms_];
    const double* const shape = &shape_[(window_ - (n - s)) * num_terms_];
    for (int64_t i = 0; i < count * num_terms_; ++i) {
      terms[i] = terms[i] * decay + alpha * shape[i];
    }
    s += count;
  }
  if (n <= window_ && num_terms_ > 0) {
    std::copy_n(terms_.begin(), num_terms_, base_terms_.begin());
  }

  const int64_t at = n % kKeptSteps;
  if (n < kKeptSteps) {
    terms_.resize(terms_.size() + num_terms_);
    log_decay_.push_back(0.0);
    alpha_.push_back(0.0);
    beta_2_power_.resize(std::max<size_t>(beta_2_power_.size(), n + 1),
                         static_cast<float>(std::pow(beta_2_, n)));
  }
  std::fill_n(terms_.begin() + at * num_terms_, num_terms_, 0.0);
  log_decay_[at] = log_before + std::log(decay);
  alpha_[at] = alpha;
  if (beta_1_power_.size() == n && beta_1_power_.back() > 0.0f) {
    beta_1_power_.push_back(static_cast<float>(std::pow(beta_1_, n)));
  }
}

const StepHistory::Run& StepHistory::RunOf(uint32_t k) const {
  const auto after =
      std::upper_bound(runs_.begin(), runs_.end(), k,
                       [](uint32_t step, const Run& run) { return step < run.first; });
  return *(after - 1);
}

double StepHistory::LogDecay(uint32_t k) const {
  if (num_kept_ - k < kKeptSteps) return log_decay_[k % kKeptSteps];
  if (k == 0) return 0.0;
  const Run& run = RunOf(k);
  return run.log_before + (k - run.first + 1) * std::log(1.0 - weight_decay_ * run.learning_rate);
}

double StepHistory::Alpha(uint32_t k) const {
  k -= base_;
  if (num_kept_ - k < kKeptSteps) return alpha_[k % kKeptSteps];
  const Run& run = RunOf(k);
  return AlphaOf(run.learning_rate, run.step + (k - run.first));
}

double StepHistory::Decay(uint32_t k) const {
  return weight_decay_ == 0.0 ? 1.0 : 1.0 - weight_decay_ * RunOf(k - base_).learning_rate;
}

// F_i(s, s + window), the final value. Only for s older than the kept steps, which are more than
// the window.
void StepHistory::ComputeTerms(uint32_t s, double* terms) const {
  std::fill_n(terms, num_terms_, 0.0);
  const Run* run = &RunOf(s + 1);
  const Run* const end = runs_.data() + runs_.size();
  // Multiplies the powers of the betas up as t grows: calling pow would take most of the time.
  int64_t t = -1;
  double power_1 = 0.0, power_2 = 0.0;
  for (uint32_t j = 1; j <= window_; ++j) {
    const uint32_t k = s + j;
    if (run + 1 < end && run[1].first <= k) ++run;
    double alpha = rate_in_alpha_ ? run->learning_rate : 1.0;
    if (bias_correction_) {
      const int64_t step = run->step + (k - run->first);
      power_1 = step == t + 1 ? power_1 * beta_1_ : std::pow(beta_1_, step);
      power_2 = step == t + 1 ? power_2 * beta_2_ : std::pow(beta_2_, step);
      t = step;
      if (power_2 > 1e-18 || power_1 > 1e-18) alpha *= std::sqrt(1.0 - power_2) / (1.0 - power_1);
    }
    const double decay = 1.0 - weight_decay_ * run->learning_rate;
    const double* const shape = &shape_[static_cast<size_t>(window_ - j) * num_terms_];
    for (int i = 0; i < num_terms_; ++i) terms[i] = terms[i] * decay + alpha * shape[i];
  }
}

StepHistory::Factors StepHistory::Since(uint32_t last_step) const {
  Factors factors;
  const uint32_t s = FirstOwed(last_step) - 1 - base_;
  const uint32_t gap = num_kept_ - s;
  factors.row = 1.0f;
  factors.momentum = gap < beta_1_power_.size() ? beta_1_power_[gap] : 0.0f;
  factors.velocity =
      gap < beta_2_power_.size() ? beta_2_power_[gap] : static_cast<float>(std::pow(beta_2_, gap));
  double computed[kMaxTerms];
  const double* terms = computed;
  if (gap < kKeptSteps) {
    terms = terms_.data() + (s % kKeptSteps) * num_terms_;
  } else if (s == 0) {
    terms = base_terms_.data();
  } else {
    ComputeTerms(s, computed);
  }
  double since_frozen = 1.0;
  if (weight_decay_ > 0.0) {
    const double log_now = LogDecay(num_kept_);
    factors.row = static_cast<float>(std::exp(log_now - LogDecay(s)));
    if (gap > window_) since_frozen = std::exp(log_now - LogDecay(s + window_));
  }
  for (int i = 0; i < num_terms_; ++i)
    factors.terms[i] = static_cast<float>(terms[i] * since_frozen);
  return factors;
}

}  // namespace sok
