// Optimizer steps under the emulator: the CPU's table takes the same ones, bit by bit.
#include "cpp/core/cuda/update/apply.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cuda/rows/history.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

struct Trial {
  OptimizerOptions options;
  int64_t dim = 4;
  bool unique_keys = false;
  bool use_hashtable = true;
  int num_steps = 40;
};

bool Close(float a, float b, float tolerance) {
  return std::abs(a - b) <= tolerance * std::max(1.0f, std::abs(b));
}

// Rows of absent keys fall behind and are read, updated, assigned and exported later.
void TakesTheStepsOfTheCpu(const Trial& trial) {
  TableOptions table_options;
  table_options.name = "t";
  table_options.dim = trial.dim;
  table_options.initializer.a = -0.5f;
  table_options.initializer.b = 0.5f;
  table_options.use_hashtable = trial.use_hashtable;
  table_options.max_capacity = trial.use_hashtable ? 0 : 1200;
  CpuTable cpu(table_options);
  cuda::CudaTable device(table_options);
  InlineExecutor ex;
  std::mt19937 random(trial.dim);
  std::normal_distribution<float> normal;
  // exp() and pow() of the device may round otherwise; sums of powers are subtracted in each step.
  const OptimizerOptions& o = trial.options;
  const bool has_power = o.kind == OptimizerKind::kFtrl && o.learning_rate_power != -0.5f;
  const float tolerance = has_power ? 1e-5f : o.weight_decay > 0.0f ? 1e-6f : 0.0f;
  const auto check = [&](const std::vector<float>& a, const std::vector<float>& b) {
    CHECK_EQ(a.size(), b.size());
    for (size_t i = 0; i < b.size(); ++i) {
      if (Close(a[i], b[i], tolerance)) continue;
      CheckFailed(__FILE__, __LINE__,
                  "rule " + std::to_string(static_cast<int>(o.kind)) + ", dim " +
                      std::to_string(trial.dim) + ", row " + std::to_string(i / trial.dim) +
                      ": received " + std::to_string(a[i]) + " and " + std::to_string(b[i]));
    }
  };
  for (int step = 1; step <= trial.num_steps; ++step) {
    std::vector<uint64_t> keys(random() % 30);
    for (size_t i = 0; i < keys.size(); ++i) {
      keys[i] = trial.unique_keys ? (random() % 9) * 30 + i : random() % 60;
    }
    std::vector<float> grads(keys.size() * trial.dim);
    for (float& g : grads) g = normal(random);
    const float learning_rate = step < 20 ? 0.05f : 0.03f;
    const int64_t n = static_cast<int64_t>(keys.size());
    ApplyGradients(ex, cpu, trial.options, learning_rate, step, keys.data(), grads.data(), n,
                   trial.unique_keys);
    cuda::ApplyGradients(kStream, {{&device, keys.data(), grads.data(), n}}, trial.options,
                         learning_rate, step, trial.unique_keys);
    std::vector<uint64_t> asked;
    for (uint64_t key = 0; key < 80; key += 7) asked.push_back(key);
    std::vector<float> expected(asked.size() * trial.dim), rows(expected);
    cpu.Find(ex, asked.data(), asked.size(), expected.data(), nullptr);
    device.Find(kStream, asked.data(), asked.size(), rows.data(), nullptr);
    check(rows, expected);
    if (step % 13 == 0) {
      const std::vector<uint64_t> assigned = {3, 1000, 3};
      std::vector<float> values(3 * trial.dim, 0.125f * step);
      cpu.Assign(ex, assigned.data(), 3, values.data());
      device.Assign(kStream, assigned.data(), 3, values.data());
    }
    if (step % 17 == 0) {  // brings all rows up, and forgets the steps
      const TableSnapshot snapshot = cpu.Export(ex, true);
      const TableSnapshot device_snapshot = device.Export(kStream, true);
      CHECK(device_snapshot.keys == snapshot.keys);
      CHECK(device_snapshot.slot_names == snapshot.slot_names);
      check(device_snapshot.rows, snapshot.rows);
      check(device_snapshot.slot_rows, snapshot.slot_rows);
    }
  }
}

void AllRules() {
  std::vector<OptimizerOptions> rules;
  const auto add = [&](OptimizerKind kind, auto change) {
    OptimizerOptions options;
    options.kind = kind;
    change(options);
    rules.push_back(options);
  };
  const auto plain = [](OptimizerOptions&) {};
  add(OptimizerKind::kSgd, plain);
  add(OptimizerKind::kMomentum, [](auto& o) { o.momentum = 0.9f; });
  add(OptimizerKind::kMomentum, [](auto& o) { o.momentum = 0.8f, o.nesterov = true; });
  add(OptimizerKind::kMomentum, [](auto& o) { o.momentum = 0.9f, o.lazy = true; });
  add(OptimizerKind::kMomentum,
      [](auto& o) { o.momentum = 0.9f, o.momentum_before_rate = true, o.nesterov = true; });
  add(OptimizerKind::kAdagrad, plain);
  add(OptimizerKind::kRowWiseAdagrad, plain);
  add(OptimizerKind::kAdam, plain);
  add(OptimizerKind::kAdam, [](auto& o) { o.amsgrad = true; });
  add(OptimizerKind::kAdam, [](auto& o) { o.beta_1 = 0.0f; });
  // Walked: with momentum in all of the missed steps, in the first ten, and without velocity.
  add(OptimizerKind::kAdam, [](auto& o) { o.beta_1 = 0.8f, o.beta_2 = 0.5f; });
  add(OptimizerKind::kAdam, [](auto& o) { o.beta_1 = 0.01f, o.beta_2 = 0.00005f; });
  add(OptimizerKind::kAdam, [](auto& o) { o.beta_2 = 0.0f, o.epsilon = 0.1f; });
  add(OptimizerKind::kLazyAdam, plain);
  add(OptimizerKind::kLazyAdam, [](auto& o) { o.amsgrad = true; });
  add(OptimizerKind::kFtrl, plain);
  add(OptimizerKind::kFtrl, [](auto& o) { o.learning_rate_power = -0.6f, o.l1 = 0.05f; });
  for (OptimizerOptions options : rules) {
    for (int64_t dim : {4, 5, 24}) {
      Trial trial;
      trial.dim = dim;
      trial.options = options;
      trial.unique_keys = dim == 24;
      TakesTheStepsOfTheCpu(trial);
      if (dim != 4) continue;
      trial.options.weight_decay = 0.05f;
      trial.options.clip_value = 0.5f;
      TakesTheStepsOfTheCpu(trial);
      trial.use_hashtable = false;
      TakesTheStepsOfTheCpu(trial);
    }
  }
}

void AFullHistoryIsSweptAndForgotten(float beta_2) {
  Trial trial;
  trial.options.kind = OptimizerKind::kAdam;
  trial.options.beta_2 = beta_2;
  TableOptions table_options;
  table_options.name = "t";
  table_options.dim = 2;
  CpuTable cpu(table_options);
  cuda::CudaTable device(table_options);
  InlineExecutor ex;
  const std::vector<uint64_t> busy = {1}, idle = {2};
  const std::vector<float> grad = {0.5f, -0.25f};
  std::vector<float> expected(2), row(2);
  const int64_t num_steps = cuda::History::kMaxSteps + 300;
  for (int64_t step = 1; step <= num_steps; ++step) {
    const bool is_idle = step == 1 || step == cuda::History::kMaxSteps - 50;
    const uint64_t* const key = is_idle ? idle.data() : busy.data();
    ApplyGradients(ex, cpu, trial.options, 1e-3f, step, key, grad.data(), 1, true);
    cuda::ApplyGradients(kStream, {{&device, key, grad.data(), 1}}, trial.options, 1e-3f, step,
                         true);
    if (step % 1024 != 0 && step != num_steps) continue;
    cpu.Find(ex, idle.data(), 1, expected.data(), nullptr);
    device.Find(kStream, idle.data(), 1, row.data(), nullptr);
    for (int d = 0; d < 2; ++d) CHECK(Close(row[d], expected[d], 1e-6f));
  }
}

// A whole step: lookup, gradient by key, update.
void AWarmStepHasFewLaunches(const OptimizerOptions& optimizer, int lookup_launches,
                             int update_launches) {
  TableOptions options;
  options.name = "t";
  options.dim = 8;
  options.initial_capacity = 10000;
  cuda::CudaTable table(options);
  std::vector<uint64_t> keys(500);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 200 * 31;
  std::vector<float> rows(keys.size() * 8), grads(keys.size() * 8, 0.5f);
  const auto step = [&](int n) {
    const auto before = emulator::num_launches;
    table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
    const auto lookup = emulator::num_launches - before;
    cuda::ApplyGradients(kStream,
                         {{&table, keys.data(), grads.data(), static_cast<int64_t>(keys.size())}},
                         optimizer, 0.1f, n);
    CHECK_EQ(lookup, lookup_launches);
    CHECK_EQ(emulator::num_launches - before - lookup, update_launches);
  };
  cuda::ApplyGradients(kStream,
                       {{&table, keys.data(), grads.data(), static_cast<int64_t>(keys.size())}},
                       optimizer, 0.1f, 1);
  for (int n = 2; n <= 3; ++n) step(n);
  const int64_t allocations = emulator::num_allocations, waits = emulator::num_host_waits;
  for (int n = 4; n <= 10; ++n) step(n);
  CHECK_EQ(emulator::num_allocations, allocations);
  CHECK_EQ(emulator::num_host_waits, waits);
}

void WarmSteps() {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdagrad;
  // Insert, count, copy; of the update 2 are CUB's scan.
  AWarmStepHasFewLaunches(options, 3, 13);
  options.kind = OptimizerKind::kAdam;
  AWarmStepHasFewLaunches(options, 3, 14);  // one more adds the step to the history
  options.beta_2 = 0.5f;                    // and one each walks the steps that rows have missed
  AWarmStepHasFewLaunches(options, 4, 15);
}

// A batch of all keys that a table has, which began without room.
void KnownKeysFindRoom() {
  for (int num_keys : {30, 256, 400, 5000}) {
    TableOptions options;
    options.name = "t";
    options.dim = 8;
    cuda::CudaTable table(options);
    std::vector<uint64_t> keys(num_keys);
    for (int i = 0; i < num_keys; ++i) keys[i] = i * 31;
    std::vector<float> rows(keys.size() * 8);
    const auto look = [&] {
      table.FindOrInsert(kStream, keys.data(), num_keys, rows.data(), nullptr);
    };
    for (int n = 0; n < 4; ++n) look();
    const int64_t launches = emulator::num_launches, waits = emulator::num_host_waits;
    for (int n = 0; n < 5; ++n) look();
    // The host asks for the size again where a copy of it is late twice, which is drawn at random.
    CHECK(emulator::num_launches <= launches + 5 * 3 + 2);
    CHECK(emulator::num_host_waits <= waits + 5);  // for an earlier batch, which has ended
    CHECK(table.Stats(kStream).num_buckets <= 4 * num_keys);
  }
}

void AnotherOptimizerIsRefused() {
  TableOptions table_options;
  table_options.name = "t";
  table_options.dim = 2;
  cuda::CudaTable table(table_options);
  const std::vector<uint64_t> key = {1};
  const std::vector<float> grad = {0.5f, -0.25f};
  OptimizerOptions options;
  cuda::ApplyGradients(kStream, {{&table, key.data(), grad.data(), 1}}, options, 0.1f, 1);
  options.kind = OptimizerKind::kAdam;
  CHECK_THROWS(
      cuda::ApplyGradients(kStream, {{&table, key.data(), grad.data(), 1}}, options, 0.1f, 1),
      std::invalid_argument, "Table 't' has sgd");
  CHECK_THROWS(
      cuda::ApplyGradients(kStream, {{&table, key.data(), grad.data(), 1}}, options, 0.1f, 0),
      std::invalid_argument, "counts from 1");
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::AllRules();
  sok::AFullHistoryIsSweptAndForgotten(0.999f);
  sok::AFullHistoryIsSweptAndForgotten(0.5f);
  sok::WarmSteps();
  sok::KnownKeysFindRoom();
  sok::AnotherOptimizerIsRefused();
  CHECK_EQ(emulator::bytes_allocated, 0);
}
