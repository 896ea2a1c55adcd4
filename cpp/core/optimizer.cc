#include "cpp/core/optimizer.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

namespace sok {
namespace {

struct KindName {
  OptimizerKind kind;
  const char* name;
};

constexpr KindName kKinds[] = {
    {OptimizerKind::kSgd, "sgd"},         {OptimizerKind::kMomentum, "momentum"},
    {OptimizerKind::kAdagrad, "adagrad"}, {OptimizerKind::kRowWiseAdagrad, "rowwise_adagrad"},
    {OptimizerKind::kAdam, "adam"},       {OptimizerKind::kLazyAdam, "lazy_adam"},
    {OptimizerKind::kFtrl, "ftrl"},       {OptimizerKind::kAdagradDecay, "adagrad_decay"},
    {OptimizerKind::kRmsprop, "rmsprop"},
};

// Above this the momentum of an idle row takes more than 55,000 steps to die out, and the history
// that replays them would cost more than the rows.
constexpr float kMaxDecay = 0.9995f;

std::string Text(float value, int digits = 7) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*g", digits, static_cast<double>(value));
  return text;
}

std::string Text(bool value, int) { return value ? "true" : "false"; }
std::string Text(int64_t value, int) { return std::to_string(value); }

void Require(bool condition, const char* name, const char* requirement, float received) {
  if (condition) return;
  throw std::invalid_argument("`" + std::string(name) + "` must be " + requirement +
                              ". Received: " + Text(received));
}

}  // namespace

OptimizerKind ParseOptimizerKind(const std::string& name) {
  for (const KindName& entry : kKinds) {
    if (name == entry.name) return entry.kind;
  }
  throw std::invalid_argument(
      "The optimizer rule must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, "
      "lazy_adam, ftrl, adagrad_decay, rmsprop. Received: '" +
      name + "'");
}

const char* OptimizerKindName(OptimizerKind kind) {
  for (const KindName& entry : kKinds) {
    if (kind == entry.kind) return entry.name;
  }
  throw std::invalid_argument("Unknown optimizer kind: " + std::to_string(static_cast<int>(kind)));
}

double AsWritten(float value) { return std::strtod(Text(value).c_str(), nullptr); }

void OptimizerOptions::Validate() const {
  const auto finite_from_zero = [](float value) { return std::isfinite(value) && value >= 0.0f; };
  const char* const kFromZero = "a finite number of at least 0";
  const char* const kDecay = "in [0, 0.9995]";
  Require(finite_from_zero(weight_decay), "weight_decay", kFromZero, weight_decay);
  Require(finite_from_zero(clip_value), "clip_value", kFromZero, clip_value);
  switch (kind) {
    case OptimizerKind::kSgd:
      break;
    case OptimizerKind::kMomentum:
      Require(momentum >= 0.0f && momentum <= kMaxDecay, "momentum", kDecay, momentum);
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kLazyAdam:
      Require(beta_1 >= 0.0f && beta_1 <= kMaxDecay, "beta_1", kDecay, beta_1);
      Require(beta_2 >= 0.0f && beta_2 < 1.0f, "beta_2", "in [0, 1)", beta_2);
      Require(finite_from_zero(epsilon), "epsilon", kFromZero, epsilon);
      Require(row_weight_decay >= 0.0f && row_weight_decay < 1.0f, "row_weight_decay", "in [0, 1)",
              row_weight_decay);
      Require(row_weight_decay == 0.0f || (kind == OptimizerKind::kLazyAdam && !amsgrad),
              "row_weight_decay", "0 unless the rule is lazy_adam without amsgrad",
              row_weight_decay);
      break;
    case OptimizerKind::kRmsprop:
      Require(beta_1 >= 0.0f && beta_1 < 1.0f, "beta_1", "in [0, 1)", beta_1);
      Require(beta_2 >= 0.0f && beta_2 < 1.0f, "beta_2", "in [0, 1)", beta_2);
      Require(finite_from_zero(epsilon), "epsilon", kFromZero, epsilon);
      break;
    case OptimizerKind::kAdagradDecay:
      Require(std::isfinite(initial_accumulator) && initial_accumulator > 0.0f,
              "initial_accumulator", "a finite positive number", initial_accumulator);
      Require(decay_steps > 0, "decay_steps", "positive", static_cast<float>(decay_steps));
      Require(decay_rate > 0.0f && decay_rate < 1.0f, "decay_rate", "in (0, 1)", decay_rate);
      break;
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kRowWiseAdagrad:
      Require(finite_from_zero(epsilon), "epsilon", kFromZero, epsilon);
      Require(finite_from_zero(initial_accumulator), "initial_accumulator", kFromZero,
              initial_accumulator);
      break;
    case OptimizerKind::kFtrl:
      Require(finite_from_zero(initial_accumulator), "initial_accumulator", kFromZero,
              initial_accumulator);
      Require(finite_from_zero(l1), "l1", kFromZero, l1);
      Require(finite_from_zero(l2), "l2", kFromZero, l2);
      Require(finite_from_zero(l2_shrinkage), "l2_shrinkage", kFromZero, l2_shrinkage);
      Require(finite_from_zero(beta), "beta", kFromZero, beta);
      Require(std::isfinite(learning_rate_power) && learning_rate_power <= 0.0f,
              "learning_rate_power", "a finite number of at most 0", learning_rate_power);
      break;
  }
}

std::string OptimizerOptions::ToString(int digits) const {
  std::ostringstream out;
  out << OptimizerKindName(kind) << '(';
  const char* separator = "";
  ForEachField(*this, [&](const char* name, auto value, int kinds) {
    if ((kinds >> static_cast<int>(kind) & 1) == 0) return;
    out << separator << name << '=' << Text(value, digits);
    separator = ", ";
  });
  out << ')';
  return out.str();
}

// Equal if every field that the rule reads agrees to 7 digits: rules use no more digits.
bool OptimizerOptions::operator==(const OptimizerOptions& other) const {
  return ToString() == other.ToString();
}

}  // namespace sok
