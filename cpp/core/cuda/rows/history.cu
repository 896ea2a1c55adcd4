#include <algorithm>
#include <cmath>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/rows/history.h"

namespace sok {
namespace cuda {
// The numbers of step n, which the host computes.
struct StepRecord {
  uint32_t n;
  double alpha;
  double decay;      // 1 - weight_decay * learning_rate
  double log_decay;  // log P(0, n)
  float beta_1_power;
  float beta_2_power;
};

// Adds step n to the records of the steps before it: element e is term e % num_terms of step
// n - length + e / num_terms. Record n begins with zeros.
struct AppendJob {
  StepRecord record;
  uint32_t length;
  uint32_t window;
  int num_terms;
  const double* shape;
  double* terms;
  double* log_decay;
  float* beta_1_power;
  float* beta_2_power;
  double* alpha;  // the constants of a step, for kAdamSteps; otherwise null
  double* decay;

  int64_t NumThreads() const { return std::max<int64_t>(1, int64_t{length + 1} * num_terms); }
  SOK_DEVICE void Run(int64_t e) const {
    if (e == 0) {
      log_decay[record.n] = record.log_decay;
      beta_1_power[record.n] = record.beta_1_power;
      beta_2_power[record.n] = record.beta_2_power;
      if (alpha != nullptr) alpha[record.n] = record.alpha;
      if (decay != nullptr) decay[record.n] = record.decay;
    }
    const int64_t grown = int64_t{length} * num_terms;
    const int64_t first = int64_t{record.n - length} * num_terms;
    const int64_t first_shape = int64_t{window - length} * num_terms;
    if (e < grown) {
      terms[first + e] = terms[first + e] * record.decay + record.alpha * shape[first_shape + e];
    } else if (e < grown + num_terms) {
      terms[first + e] = 0.0;
    }
  }
};

namespace {

__global__ void __launch_bounds__(kThreads)
    StartKernel(int num_terms, double* terms, double* log_decay, float* beta_1_power,
                float* beta_2_power) {
  const int64_t e = GlobalThread();
  if (e < num_terms) terms[e] = 0.0;
  if (e > 0) return;
  log_decay[0] = 0.0;
  beta_1_power[0] = 1.0f;
  beta_2_power[0] = 1.0f;
}

}  // namespace

History::History(const OptimizerOptions& options, Stream stream, int64_t max_steps)
    : options_(options),
      max_steps_(max_steps),
      beta_1_(AsWritten(options.beta_1)),
      beta_2_(AsWritten(options.beta_2)),
      steps_(options) {
  if (!owes()) return;
  const std::vector<double>& shape = steps_.shape();
  shape_ = Buffer(shape.size() * sizeof(double), stream);
  CopyToDevice(stream, shape_.data(), shape.data(), shape_.bytes());
  terms_ = Buffer(static_cast<size_t>(max_steps_) * steps_.num_terms() * sizeof(double), stream);
  log_decay_ = Buffer(static_cast<size_t>(max_steps_) * sizeof(double), stream);
  beta_1_power_ = Buffer(static_cast<size_t>(max_steps_) * sizeof(float), stream);
  beta_2_power_ = Buffer(static_cast<size_t>(max_steps_) * sizeof(float), stream);
  if (steps_.kind() == ReplayKind::kAdamSteps) {
    alpha_ = Buffer(static_cast<size_t>(max_steps_) * sizeof(double), stream);
    if (options_.weight_decay > 0.0f) {
      decay_ = Buffer(static_cast<size_t>(max_steps_) * sizeof(double), stream);
    }
  }
  Forget(stream);
}

HistoryRef History::Ref() const {
  HistoryRef ref;
  ref.kind = steps_.kind();
  ref.decays = options_.weight_decay > 0.0f;
  ref.num_terms = steps_.num_terms();
  ref.base = base_;
  ref.now = now_;
  ref.window = steps_.window();
  ref.epsilon = options_.epsilon;
  ref.momentum_scale = options_.nesterov ? options_.momentum : 1.0f;
  if (options_.momentum_before_rate) ref.momentum_scale = -ref.momentum_scale;
  ref.terms = terms_.as<double>();
  ref.log_decay = log_decay_.as<double>();
  ref.beta_1_power = beta_1_power_.as<float>();
  ref.beta_2_power = beta_2_power_.as<float>();
  ref.alpha = alpha_.as<double>();
  ref.decay = decay_.as<double>();
  ref.beta_1 = beta_1_;
  ref.beta_2 = beta_2_;
  if (ref.decays && now_ > 0) ref.initial_decay = static_cast<float>(std::exp(steps_.log_decay()));
  return ref;
}

void History::Append(Stream stream, const std::vector<History*>& histories, float learning_rate,
                     int64_t step) {
  std::vector<AppendJob> jobs;
  jobs.reserve(histories.size());  // nothing fails from here on
  for (History* history : histories) {
    if (history->owes()) jobs.push_back(history->NextStep(learning_rate, step));
  }
  LaunchJobs(stream, jobs);
}

AppendJob History::NextStep(float learning_rate, int64_t step) {
  steps_.Append(learning_rate, step);
  ++now_;
  const StepHistory::Factors factors = steps_.Since(base_);
  StepRecord record;
  record.n = now_;
  record.alpha = steps_.Alpha(steps_.num_steps());
  record.decay = steps_.Decay(steps_.num_steps());
  record.log_decay = steps_.log_decay();
  record.beta_1_power = factors.momentum;
  record.beta_2_power = factors.velocity;
  return {record,
          std::min(steps_.window(), now_),
          steps_.window(),
          steps_.num_terms(),
          shape_.as<double>(),
          terms_.as<double>(),
          log_decay_.as<double>(),
          beta_1_power_.as<float>(),
          beta_2_power_.as<float>(),
          alpha_.as<double>(),
          decay_.as<double>()};
}

void History::Forget(Stream stream) {
  if (!owes()) return;
  steps_.Forget();
  base_ = steps_.num_steps();
  now_ = 0;
  Launch(StartKernel, std::max(1, steps_.num_terms()), stream, steps_.num_terms(),
         terms_.as<double>(), log_decay_.as<double>(), beta_1_power_.as<float>(),
         beta_2_power_.as<float>());
}

void History::MoveTo(Stream stream) {
  for (Buffer* buffer :
       {&shape_, &terms_, &log_decay_, &beta_1_power_, &beta_2_power_, &alpha_, &decay_}) {
    buffer->MoveTo(stream);
  }
}

}  // namespace cuda
}  // namespace sok
