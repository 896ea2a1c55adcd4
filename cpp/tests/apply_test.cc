#include "cpp/core/cpu/apply.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/adam_replay.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr OptimizerKind kKinds[] = {
    OptimizerKind::kSgd,  OptimizerKind::kMomentum,     OptimizerKind::kAdagrad,
    OptimizerKind::kAdam, OptimizerKind::kLazyAdam,     OptimizerKind::kRowWiseAdagrad,
    OptimizerKind::kFtrl, OptimizerKind::kAdagradDecay, OptimizerKind::kRmsprop};

TableOptions Options(int64_t dim) {
  TableOptions options;
  options.name = "table";
  options.dim = dim;
  return options;
}

struct Step {
  std::vector<uint64_t> keys;
  std::vector<float> grads;
};

// Batches with repeated keys, keys absent for a while and new ones.
std::vector<Step> RandomSteps(int num_steps, int64_t num_keys, int64_t dim) {
  std::mt19937_64 generator(num_steps);
  std::normal_distribution<float> normal;
  std::vector<Step> steps(num_steps);
  for (int s = 0; s < num_steps; ++s) {
    for (int64_t k = 0; k < num_keys; ++k) {
      steps[s].keys.push_back((generator() % (num_keys * (s + 1))) * 0x9e3779b97f4a7c15ull);
    }
    for (int64_t i = 0; i < num_keys * dim; ++i) steps[s].grads.push_back(normal(generator));
  }
  return steps;
}

std::vector<float> Train(Executor& ex, const OptimizerOptions& options, int64_t dim,
                         const std::vector<Step>& steps) {
  CpuTable table(Options(dim));
  int64_t step = 0;
  for (const Step& s : steps) {
    ++step;
    ApplyGradients(ex, table, options, 0.1f / step, step, s.keys.data(), s.grads.data(),
                   static_cast<int64_t>(s.keys.size()));
  }
  return table.Export(ex, true).rows;
}

void TestThreadCountDoesNotShow() {
  for (OptimizerKind kind : kKinds) {
    OptimizerOptions options;
    options.kind = kind;
    options.momentum = 0.9f;
    options.weight_decay = 0.1f;
    const std::vector<Step> steps = RandomSteps(8, 3000, 5);
    InlineExecutor one;
    const std::vector<float> expected = Train(one, options, 5, steps);
    for (int num_threads : {2, 5}) {
      ThreadPool pool(num_threads);
      CHECK(Train(pool, options, 5, steps) == expected);
    }
  }
}

// One element through one step, worked out by hand.
float OneStep(OptimizerOptions options, float learning_rate, float grad) {
  InlineExecutor ex;
  TableOptions table_options = Options(1);
  table_options.initializer.kind = InitializerKind::kConstant;
  table_options.initializer.a = 1.0f;
  CpuTable table(table_options);
  const uint64_t key = ~uint64_t{0};
  ApplyGradients(ex, table, options, learning_rate, 1, &key, &grad, 1);
  float row = 0.0f;
  table.Find(ex, &key, 1, &row, nullptr);
  return row;
}

void TestFirstSteps() {
  OptimizerOptions options;
  CHECK(std::abs(OneStep(options, 0.5f, 0.5f) - 0.75f) < 1e-6);
  options.clip_value = 0.25f;
  CHECK(std::abs(OneStep(options, 0.5f, 0.5f) - 0.875f) < 1e-6);
  options.weight_decay = 0.5f;  // first 1 * (1 - 0.25), then the step
  CHECK(std::abs(OneStep(options, 0.5f, 0.5f) - 0.625f) < 1e-6);
  options = OptimizerOptions();
  options.kind = OptimizerKind::kAdagrad;  // acc = 0.11 + 0.25 = 0.36
  options.initial_accumulator = 0.11f;
  options.epsilon = 0.0f;
  CHECK(std::abs(OneStep(options, 0.6f, 0.5f) - 0.5f) < 1e-6);
  options.kind = OptimizerKind::kAdam;  // the first step is lr in the direction of the gradient
  CHECK(std::abs(OneStep(options, 0.25f, 3.0f) - 0.75f) < 1e-6);
  options.kind = OptimizerKind::kLazyAdam;
  CHECK(std::abs(OneStep(options, 0.25f, -3.0f) - 1.25f) < 1e-6);
}

void TestMergeGradients() {
  ThreadPool pool(2);
  const uint64_t keys[] = {7, 3, 7, 7, 3, 1};
  const float grads[] = {1, 10, 2, 20, 3, 30, 4, 40, 5, 50, 6, 60};
  uint64_t unique[6];
  float sums[12];
  CHECK_EQ(MergeGradients(pool, keys, grads, 6, 2, unique, sums), 3);
  CHECK_EQ(unique[0], uint64_t{7});
  CHECK_EQ(unique[1], uint64_t{3});
  CHECK_EQ(unique[2], uint64_t{1});
  const float expected[] = {8, 80, 7, 70, 6, 60};
  for (int i = 0; i < 6; ++i) CHECK_EQ(sums[i], expected[i]);
  CHECK_EQ(MergeGradients(pool, keys, grads, 0, 2, unique, sums), 0);
}

// The terms of the series against the sums that define them, over several learning rates.
void TestHistory() {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  options.beta_1 = 0.8f;
  options.weight_decay = 0.01f;
  StepHistory history(options);
  CHECK(history.num_terms() >= 2);
  const int num_steps = 400;
  std::vector<double> rates(num_steps + 1);
  for (int k = 1; k <= num_steps; ++k) {
    rates[k] = k < 100 ? 0.1 : 0.02 + 0.0001 * k;
    history.Append(rates[k], k);
  }
  for (uint32_t s : {0u, 1u, 57u, 250u, 390u, 399u, 400u}) {
    const StepHistory::Factors factors = history.Since(s);
    double decay = 1.0;
    for (int i = 0; i < history.num_terms(); ++i) {
      double expected = 0.0;
      decay = 1.0;
      for (int k = num_steps; k > static_cast<int>(s); --k) {
        const double j = k - s;
        const double alpha = rates[k] * std::sqrt(1 - std::pow(0.999, k)) / (1 - std::pow(0.8, k));
        expected += decay * alpha * std::pow(0.8, j) * std::pow(1 - std::pow(0.999, j / 2), i);
        decay *= 1 - 0.01 * rates[k];
      }
      CHECK(std::abs(factors.terms[i] - expected) < 1e-6 * expected + 1e-12);
    }
    if (s == num_steps) decay = 1.0;
    CHECK(std::abs(factors.row - decay) < 1e-6);
    CHECK(std::abs(factors.momentum - std::pow(0.8, num_steps - s)) < 1e-7);
    CHECK(std::abs(factors.velocity - std::pow(0.999, num_steps - s)) < 1e-7);
  }
  const double decay_of_all = history.decay();
  history.Forget();
  CHECK_EQ(history.num_steps(), uint32_t{400});
  CHECK_EQ(history.Since(0).row, 1.0f);  // imported or new: its initial row carries the scale
  CHECK_EQ(history.Since(400).momentum, 1.0f);
  double all = 1.0;
  for (int k = 1; k <= num_steps; ++k) all *= 1 - 0.01 * rates[k];
  CHECK(std::abs(decay_of_all - all) < 1e-9);
  CHECK_EQ(history.decay(), 1.0);
}

void TestErrorLeavesTheTableUsable() {
  ThreadPool pool(2);
  TableOptions table_options = Options(2);
  table_options.max_capacity = 2;
  CpuTable table(table_options);
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  const uint64_t keys[] = {1, 2, 3};
  const float grads[] = {1, 1, 1, 1, 1, 1};
  ApplyGradients(pool, table, options, 0.1f, 1, keys, grads, 2);
  CHECK_THROWS(ApplyGradients(pool, table, options, 0.1f, 2, keys, grads, 3), std::length_error,
               "max_capacity=2");
  OptimizerOptions other = options;
  other.epsilon = 1e-3f;
  CHECK_THROWS(ApplyGradients(pool, table, other, 0.1f, 2, keys, grads, 2), std::invalid_argument,
               "Table 'table' has adam(");
  ApplyGradients(pool, table, options, 0.1f, 2, keys, grads, 2);
}

// Tables of one step: many small ones, which threads share out.
struct Tables {
  std::vector<std::unique_ptr<CpuTable>> tables;
  std::vector<Step> batches;

  // Table 3 is too small for its batch, table 5 just large enough, where `bounded`.
  Tables(int n, bool bounded) {
    for (int i = 0; i < n; ++i) {
      TableOptions options = Options(2 + i % 3);
      options.name = "table" + std::to_string(i);
      if (bounded && i == 3) options.max_capacity = 5;
      if (bounded && i == 5) options.max_capacity = 404;
      tables.push_back(std::make_unique<CpuTable>(options));
      batches.push_back(RandomSteps(1, 400 + i, options.dim)[0]);
    }
  }
  std::vector<TableGradients> Gradients() const {
    std::vector<TableGradients> result;
    for (size_t i = 0; i < tables.size(); ++i) {
      result.push_back({tables[i].get(), batches[i].keys.data(), batches[i].grads.data(),
                        static_cast<int64_t>(batches[i].keys.size())});
    }
    return result;
  }
};

// A step of many tables is the step of each.
void TestGroupIsEachTableAlone() {
  for (OptimizerKind kind : kKinds) {
    OptimizerOptions options;
    options.kind = kind;
    options.momentum = 0.9f;
    options.weight_decay = 0.1f;
    for (int num_threads : {1, 3}) {
      ThreadPool pool(num_threads);
      InlineExecutor ex;
      Tables group(20, false), alone(20, false);
      for (int64_t step = 1; step <= 3; ++step) {
        ApplyGradients(pool, group.Gradients(), options, 0.1f, step);
        for (const TableGradients& one : alone.Gradients()) {
          ApplyGradients(ex, *one.table, options, 0.1f, step, one.keys, one.grads, one.num_keys);
        }
      }
      for (size_t i = 0; i < group.tables.size(); ++i) {
        const TableSnapshot a = group.tables[i]->Export(ex, true);
        const TableSnapshot b = alone.tables[i]->Export(ex, true);
        CHECK(a.keys == b.keys && a.rows == b.rows && a.slot_rows == b.slot_rows);
      }
    }
  }
}

// Options are equal if what the rule reads agrees to 7 digits, also while memory is short.
void TestEqualOptions() {
  OptimizerOptions adam, other;
  adam.kind = other.kind = OptimizerKind::kAdam;
  other.l1 = 3.0f;  // Adam does not read it
  other.epsilon = std::nextafter(adam.epsilon, 1.0f);
  CHECK(adam == other);
  other.epsilon = 1.000001e-7f;
  CHECK(adam != other);
  other = adam;
  other.amsgrad = true;
  CHECK(adam != other);
  other = adam;
  other.kind = OptimizerKind::kLazyAdam;
  CHECK(adam != other);
  OptimizerOptions decay;
  decay.kind = OptimizerKind::kAdagradDecay;
  decay.decay_steps = 1000000001;
  other = decay;
  CHECK(decay == other);
  other.decay_steps = 1000000002;  // integers agree in all digits
  CHECK(decay != other);
}

// Where one table cannot make the step, none does.
void TestGroupIsAllOrNothing() {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  ThreadPool pool(3);
  InlineExecutor ex;
  Tables group(20, true), other(20, false);
  CHECK_THROWS(ApplyGradients(pool, group.Gradients(), options, 0.1f, 1), std::length_error,
               "table 'table3'");
  // New keys of others may have been inserted: with the initial row that they would read anyway.
  CHECK_EQ(group.tables[3]->size(), 0);
  for (int i = 0; i < 20; ++i) {
    const Step& batch = group.batches[i];
    const int64_t n = batch.keys.size(), dim = group.tables[i]->dim();
    std::vector<float> rows(n * dim), initial(n * dim);
    group.tables[i]->Find(ex, batch.keys.data(), n, rows.data(), nullptr);
    other.tables[i]->Find(ex, batch.keys.data(), n, initial.data(), nullptr);
    CHECK(rows == initial);
  }

  // Another optimizer on one table, far back: no table changes.
  OptimizerOptions sgd;
  const uint64_t key = 1;
  const float grad[] = {1, 1, 1, 1};
  ApplyGradients(ex, *other.tables[17], sgd, 0.1f, 1, &key, grad, 1);
  CHECK_THROWS(ApplyGradients(pool, other.Gradients(), options, 0.1f, 1), std::invalid_argument,
               "Table 'table17' has sgd(");
  for (size_t i = 0; i < other.tables.size(); ++i) {
    CHECK_EQ(other.tables[i]->size(), i == 17 ? 1 : 0);
    CHECK(other.tables[i]->slots().empty());
  }

  std::vector<TableGradients> twice = other.Gradients();
  twice.push_back(twice[2]);
  CHECK_THROWS(ApplyGradients(pool, twice, options, 0.1f, 1), std::invalid_argument, "'table2'");
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestFirstSteps();
  sok::TestMergeGradients();
  sok::TestHistory();
  sok::TestThreadCountDoesNotShow();
  sok::TestErrorLeavesTheTableUsable();
  sok::TestGroupIsEachTableAlone();
  sok::TestEqualOptions();
  sok::TestGroupIsAllOrNothing();
  return 0;
}
