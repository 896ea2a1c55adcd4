#include "cpp/core/optimizer.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "cpp/core/names.h"

namespace sok {
namespace {

constexpr const char* kKinds[] = {"sgd",    "momentum",  "adagrad", "rowwise_adagrad",
                                  "adam",   "lazy_adam", "ftrl",    "adagrad_decay",
                                  "rmsprop"};

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
  return ValueNamed<OptimizerKind>(
      name, kKinds,
      "The optimizer rule must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, "
      "lazy_adam, ftrl, adagrad_decay, rmsprop");
}

std::string OptimizerName(OptimizerKind kind) { return kKinds[static_cast<int>(kind)]; }

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

std::string OptimizerOptions::ToString(int digits) const {
  std::ostringstream out;
  out << OptimizerName(kind) << '(';
  const char* separator = "";
  ForEachField(*this, [&](const char* name, auto value, int kinds) {
    if ((kinds >> static_cast<int>(kind) & 1) == 0) return;
    out << separator << name << '=' << Text(value, digits);
    separator = ", ";
  });
  out << ')';
  return out.str();
}

// Equal if every field that the rule reads agrees to 7 digits: rules use no more digits. By numbers,
// not by text: this runs for every table at every step.
bool OptimizerOptions::operator==(const OptimizerOptions& other) const {
  struct Number {
    double value = 0.0;  // of a field that the rule reads
    bool is_float = false;
  };
  const auto numbers_of = [](const OptimizerOptions& options) {
    std::array<Number, 32> numbers;
    size_t n = 0;
    ForEachField(options, [&](const char*, auto value, int kinds) {
      Number& number = numbers.at(n++);
      number.is_float = std::is_same_v<decltype(value), float>;
      if (kinds >> static_cast<int>(options.kind) & 1) number.value = static_cast<double>(value);
    });
    return numbers;
  };
  const std::array<Number, 32> mine = numbers_of(*this), others = numbers_of(other);
  const auto agree = [](const Number& a, const Number& b) {
    return a.value == b.value || (a.is_float && AsWritten(static_cast<float>(a.value)) ==
                                                    AsWritten(static_cast<float>(b.value)));
  };
  return kind == other.kind && std::equal(mine.begin(), mine.end(), others.begin(), agree);
}

}  // namespace sok
