// Policies of CudaTable under the emulator, beside the CPU's table: after the same calls both know
// the same, and what one exports the other imports. Long random runs against a model in dicts are
// in tests/core/test_policies.py.
#include "cpp/core/policy.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

using Keys = std::vector<uint64_t>;
using Rows = std::vector<float>;
constexpr cuda::Stream kStream = nullptr;
constexpr int64_t kDim = 3;

TableOptions Options(const PolicyOptions& policy, int64_t max_capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.seed = 5;
  options.initializer.a = -1.0f;
  options.initializer.b = 1.0f;
  options.max_capacity = max_capacity;
  options.policy = policy;
  return options;
}

PolicyOptions Scored(ScoreKind score, int64_t evicted_buffer = 0) {
  PolicyOptions policy;
  policy.score = score;
  policy.evicted_buffer = evicted_buffer;
  return policy;
}

PolicyOptions Filtered(int64_t freq, int64_t bloom_max_keys = 0, int64_t bits = 64) {
  PolicyOptions policy;
  policy.filter_freq = freq;
  policy.no_permission = -2.5f;
  policy.bloom_max_keys = bloom_max_keys;
  policy.bloom_probability = 0.2;
  policy.bloom_counter_bits = bits;
  return policy;
}

// ---- beside the CPU's table ----

TableSnapshot DeviceSnapshot(cuda::CudaTable& table) { return table.Export(kStream, false); }

bool Same(const std::vector<WaitingKey>& a, const std::vector<WaitingKey>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const WaitingKey& x, const WaitingKey& y) {
                      return x.key == y.key && x.count == y.count && x.last_step == y.last_step;
                    });
}

void CheckSame(const TableSnapshot& a, const TableSnapshot& b) {
  CHECK(a.keys == b.keys);
  CHECK(a.rows == b.rows);
  CHECK(a.policy.records == b.policy.records);
  CHECK(Same(a.policy.waiting, b.policy.waiting));
  CHECK(a.policy.counters == b.policy.counters);
  CHECK_EQ(a.policy.step, b.policy.step);
}

void CheckSame(const PolicyCounts& a, const PolicyCounts& b) {
  CHECK_EQ(a.size, b.size);
  CHECK_EQ(a.seen, b.seen);
  CHECK_EQ(a.found, b.found);
  CHECK_EQ(a.admitted, b.admitted);
  CHECK_EQ(a.refused, b.refused);
  CHECK_EQ(a.written, b.written);
  CHECK_EQ(a.erased, b.erased);
  CHECK_EQ(a.evicted, b.evicted);
  CHECK_EQ(a.popped, b.popped);
  CHECK_EQ(a.buffered, b.buffered);
  CHECK_EQ(a.dropped, b.dropped);
  CHECK_EQ(a.waiting, b.waiting);
  CHECK_EQ(a.forgotten, b.forgotten);
  CHECK_EQ(a.dropped_gradients, b.dropped_gradients);
  CHECK_EQ(a.step, b.step);
  CHECK_EQ(a.seen, a.found + a.admitted + a.refused);
  CHECK_EQ(a.size, a.admitted + a.written - a.evicted - a.erased);
  CHECK_EQ(a.evicted, a.popped + a.buffered + a.dropped);
}

// The message of what `call` throws, or nothing.
template <typename F>
std::string Message(F&& call) {
  try {
    call();
  } catch (const std::length_error& error) {
    return error.what();
  }
  return "";
}

struct Twins {
  explicit Twins(const TableOptions& options) : cpu(options), device(options) {}

  // Both succeed, or both say the same.
  void Observe(const Keys& keys) {
    const int64_t n = static_cast<int64_t>(keys.size());
    const std::string message = Message([&] { cpu.RecordTrainingLookup(ex, keys.data(), n); });
    CHECK(Message([&] { device.RecordTrainingLookup(kStream, keys.data(), n); }) == message);
    num_failures += message.empty() ? 0 : 1;
  }
  void Compare() {
    CheckSame(cpu.Export(ex, false), DeviceSnapshot(device));
    CheckSame(cpu.Statistics(ex), device.Statistics(kStream));
  }

  InlineExecutor ex;
  CpuTable cpu;
  cuda::CudaTable device;
  int num_failures = 0;
};

void AgreesWithTheCpu(const PolicyOptions& policy, int64_t max_capacity) {
  Twins twins(Options(policy, max_capacity));
  std::mt19937_64 random(max_capacity + policy.filter_freq);
  for (int call = 0; call < 120; ++call) {
    Keys keys(random() % 60);
    // Many of few keys, and a few of many.
    for (uint64_t& key : keys) key = (random() % 4 == 0 ? random() % 900 : random() % 40) - 3;
    const int64_t n = static_cast<int64_t>(keys.size());
    if (random() % 12 == 0) {  // what was counted in a step is not counted in it again
      const int64_t step =
          std::max<int64_t>(0, twins.cpu.Statistics(twins.ex).step - 2 + random() % 4);
      twins.cpu.SetStep(step);
      twins.device.SetStep(step);
    }
    switch (random() % 8) {
      case 0: {
        Rows rows(n * kDim);
        for (float& x : rows) x = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
        const auto on_cpu = [&] { twins.cpu.Assign(twins.ex, keys.data(), n, rows.data()); };
        const auto on_device = [&] { twins.device.Assign(kStream, keys.data(), n, rows.data()); };
        CHECK(Message(on_cpu) == Message(on_device));
        break;
      }
      case 1:
        keys.resize(n / 6);
        CHECK_EQ(twins.cpu.Erase(twins.ex, keys.data(), n / 6),
                 twins.device.Erase(kStream, keys.data(), n / 6));
        break;
      case 2:
        CHECK_EQ(twins.cpu.Evict(twins.ex), twins.device.Evict(kStream));
        break;
      case 3: {
        std::vector<int64_t> scores(n);
        for (int64_t& score : scores) score = static_cast<int64_t>(random() % 9) - 4;
        if (policy.score != ScoreKind::kCustom) break;
        CHECK_EQ(twins.cpu.AssignScores(twins.ex, keys.data(), n, scores.data()),
                 twins.device.AssignScores(kStream, keys.data(), n, scores.data()));
        break;
      }
      default:
        twins.Observe(keys);
    }
    if (call % 10 == 9) twins.Compare();
    if (call % 40 == 39) {
      const EvictedRows expected = twins.cpu.PopEvicted(), popped = twins.device.PopEvicted();
      CHECK(popped.keys == expected.keys && popped.rows == expected.rows);
      CHECK(popped.frequencies == expected.frequencies && popped.last_steps == expected.last_steps);
    }
  }
  // What keys read, with a row and without.
  Keys keys;
  for (uint64_t key = 0; key < 900; ++key) keys.push_back(key);
  Rows expected(keys.size() * kDim), rows(expected);
  std::vector<uint8_t> found(keys.size());
  twins.cpu.Find(twins.ex, keys.data(), keys.size(), expected.data(), nullptr);
  twins.device.Find(kStream, keys.data(), keys.size(), rows.data(), found.data());
  CHECK(rows == expected);
  CHECK(std::count(found.begin(), found.end(), 1) < 900);
  if (policy.filters()) {  // by number, too
    std::vector<uint32_t> numbers(keys.size());
    twins.device.FindRows(kStream, keys.data(), keys.size(), numbers.data());
    twins.device.GatherRows(kStream, numbers.data(), keys.size(), rows.data());
    CHECK(rows == expected);
  }
  CHECK_EQ(twins.num_failures > 0, max_capacity == 20);
}

// CPU -> device -> CPU, and the other way round; then both go on in the same way.
void SnapshotsCrossOver(const PolicyOptions& policy, int64_t max_capacity) {
  Twins twins(Options(policy, max_capacity));
  std::mt19937_64 random(11);
  const auto observe = [&](int steps) {
    for (int step = 0; step < steps; ++step) {
      Keys keys(40);
      for (uint64_t& key : keys) key = random() % 300;
      twins.Observe(keys);
    }
  };
  observe(30);
  if (policy.score == ScoreKind::kCustom) {
    Keys keys;
    std::vector<int64_t> scores;
    for (uint64_t key = 0; key < 300; ++key) keys.push_back(key);
    for (uint64_t key = 0; key < 300; ++key) scores.push_back(static_cast<int64_t>(key % 7) - 3);
    twins.cpu.AssignScores(twins.ex, keys.data(), 300, scores.data());
    twins.device.AssignScores(kStream, keys.data(), 300, scores.data());
  }
  const TableSnapshot from_cpu = twins.cpu.Export(twins.ex, false);
  const TableSnapshot from_device = DeviceSnapshot(twins.device);
  CheckSame(from_cpu, from_device);
  twins.device.Import(kStream, from_cpu, /*replace=*/true);
  CheckSame(DeviceSnapshot(twins.device), from_cpu);
  twins.cpu.Import(twins.ex, DeviceSnapshot(twins.device), /*replace=*/true);
  twins.Compare();
  CHECK_EQ(twins.cpu.Statistics(twins.ex).written, twins.cpu.Statistics(twins.ex).size);
  observe(30);
  twins.Compare();
  // Keys of an exact filter into a Bloom filter of any width, and dumps of no policy into either.
  TableSnapshot keys_only;
  for (uint64_t key = 1000; key < 1020; ++key) {
    keys_only.policy.waiting.push_back({key, static_cast<int64_t>(key - 999) * 20, 3});
  }
  twins.device.Import(kStream, keys_only);
  twins.cpu.Import(twins.ex, keys_only);
  twins.Compare();
  TableSnapshot wrong;
  wrong.policy.records = {1, 2, 3};
  CHECK_THROWS(twins.device.Import(kStream, wrong, true), std::invalid_argument,
               "`records` must hold 3 values per key, 0. Received: 3");
  wrong.policy.records.clear();
  wrong.policy.counters = {1, 2, 3};
  if (policy.bloom_max_keys > 0) {
    CHECK_THROWS(twins.device.Import(kStream, wrong, true), std::invalid_argument,
                 "must be restored from one of the same size");
  }
  twins.Compare();  // `replace` did not come to pass
}

// ---- optimizers ----

void UpdatesOfEvictingTables(const OptimizerOptions& optimizer) {
  PolicyOptions policy = Scored(ScoreKind::kLru, 100);
  policy.filter_freq = 2;
  Twins twins(Options(policy, 24));
  std::mt19937_64 random(2);
  for (int step = 1; step <= 40; ++step) {
    Keys keys(12);
    for (uint64_t& key : keys) key = random() % 50;
    twins.Observe(keys);
    Rows grads(keys.size() * kDim);
    for (float& x : grads) x = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
    ApplyGradients(twins.ex, twins.cpu, optimizer, 0.1f, step, keys.data(), grads.data(),
                   keys.size());
    cuda::ApplyGradients(
        kStream, {{&twins.device, keys.data(), grads.data(), static_cast<int64_t>(keys.size())}},
        optimizer, 0.1f, step);
    CheckSame(twins.cpu.Statistics(twins.ex), twins.device.Statistics(kStream));
  }
  const EvictedRows expected = twins.cpu.PopEvicted(), popped = twins.device.PopEvicted();
  CHECK(popped.keys.size() > 30 && popped.keys == expected.keys);
  CHECK(popped.slot_names == expected.slot_names && popped.slot_widths == expected.slot_widths);
  const auto close = [](const Rows& a, const Rows& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
      return std::abs(x - y) <= 2e-6f * (1.0f + std::abs(y));
    });
  };
  CHECK(close(popped.rows, expected.rows) && close(popped.slot_rows, expected.slot_rows));
  CHECK(twins.cpu.Statistics(twins.ex).dropped_gradients > 20);
  CHECK(twins.cpu.Export(twins.ex, false).policy.records ==
        DeviceSnapshot(twins.device).policy.records);
}

// ---- all or nothing, and what it costs ----

// Wherever memory runs out, a lookup that failed was not seen. The last one evicts and, with a
// filter, both admits keys and makes others wait.
void WithoutMemoryNothingHappens(PolicyOptions policy) {
  if (policy.bloom_max_keys > 0) policy.bloom_max_keys = 100000;  // no key comes too early
  const bool filters = policy.filters();
  const int64_t max_capacity = filters ? 60 : 1500;
  std::vector<Keys> lookups(4);
  for (uint64_t key = 0; key < 40; ++key) {
    lookups[0].push_back(key);
    lookups[1].push_back(key);
    if (filters) lookups[2].push_back(key + 100);
  }
  for (uint64_t key = 100; key < (filters ? 3000u : 1600u); ++key) lookups[3].push_back(key);
  CpuTable expected(Options(policy, max_capacity));
  InlineExecutor ex;
  for (const Keys& keys : lookups) expected.RecordTrainingLookup(ex, keys.data(), keys.size());
  CHECK(expected.Statistics(ex).evicted > 0);
  int num_failures = 0;
  bool failed = true;
  for (int64_t left = 0; failed; ++left) {
    cuda::CudaTable table(Options(policy, max_capacity));
    for (int i = 0; i < 3; ++i)
      table.RecordTrainingLookup(kStream, lookups[i].data(), lookups[i].size());
    const TableSnapshot before = DeviceSnapshot(table);
    const PolicyCounts statistics = table.Statistics(kStream);
    const Keys& last = lookups[3];
    emulator::allocations_left = left;
    failed = false;
    try {
      table.RecordTrainingLookup(kStream, last.data(), last.size());
    } catch (const cuda::CudaError&) {
      failed = true;
    }
    emulator::allocations_left = INT64_MAX;
    if (failed) {
      ++num_failures;
      CheckSame(DeviceSnapshot(table), before);
      CheckSame(table.Statistics(kStream), statistics);
      table.RecordTrainingLookup(kStream, last.data(), last.size());
    }
    CheckSame(DeviceSnapshot(table), expected.Export(ex, false));
    CheckSame(table.Statistics(kStream), expected.Statistics(ex));
  }
  CHECK(num_failures > 0);
}

void AWarmLookupWaitsOnce() {
  cuda::CudaTable table(Options(Filtered(2)));
  Keys keys;
  for (uint64_t key = 0; key < 300; ++key) keys.push_back(key * 31);
  for (int i = 0; i < 20; ++i) table.RecordTrainingLookup(kStream, keys.data(), keys.size());
  const int64_t allocations = emulator::num_allocations, waits = emulator::num_host_waits;
  for (int i = 0; i < 10; ++i) table.RecordTrainingLookup(kStream, keys.data(), keys.size());
  CHECK_EQ(emulator::num_allocations, allocations);
  CHECK_EQ(emulator::num_host_waits, waits + 10);
}

void Errors() {
  cuda::CudaTable plain(Options(PolicyOptions()));
  CHECK(!plain.keeps_records() && !plain.filters());
  const char* const needs = "needs a table with an admission or eviction policy";
  CHECK_THROWS(plain.RecordTrainingLookup(kStream, nullptr, 0), std::invalid_argument, needs);
  CHECK_THROWS(plain.Evict(kStream), std::invalid_argument, needs);
  CHECK_THROWS(plain.PopEvicted(), std::invalid_argument, needs);
  CHECK_THROWS(plain.Statistics(kStream), std::invalid_argument, needs);
  CHECK_THROWS(plain.SetStep(1), std::invalid_argument, needs);
  cuda::CudaTable table(Options(Filtered(2)));
  CHECK(table.keeps_records() && table.filters());
  CHECK_THROWS(table.SetStep(-1), std::invalid_argument, "`step` must be in [0, 2^62]");
  CHECK_THROWS(table.AssignScores(kStream, nullptr, 0, nullptr), std::invalid_argument,
               "custom scores");
  CHECK_THROWS(cuda::CudaTable unbounded(Options(Scored(ScoreKind::kLru))), std::invalid_argument,
               "positive `max_capacity`");
}

void ClearedTablesAreAsNew(const PolicyOptions& policy) {
  Twins twins(Options(policy, 20));
  for (uint64_t step = 0; step < 6; ++step) twins.Observe({step, step + 1, step + 50, 7});
  twins.cpu.Clear(twins.ex);
  twins.device.Clear(kStream);
  twins.Compare();
  for (uint64_t step = 0; step < 30; ++step) twins.Observe({step, step + 1, step + 50, 7});
  twins.Compare();
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  using sok::PolicyOptions;
  using sok::ScoreKind;
  PolicyOptions recorded, steps, weight, all, bloom_lfu;
  recorded.record = true;
  steps.steps_to_live = 6;
  steps.evicted_buffer = 30;
  weight.l2_threshold = 0.4f;
  weight.evicted_buffer = 30;
  all = sok::Scored(ScoreKind::kLfu, 17);
  all.filter_freq = 2;
  all.steps_to_live = 9;
  all.l2_threshold = 0.1f;
  bloom_lfu = sok::Filtered(2, 30, 16);
  bloom_lfu.score = ScoreKind::kLfu;
  for (const PolicyOptions& policy :
       {recorded, steps, weight, sok::Filtered(3), sok::Filtered(3, 100, 8),
        sok::Filtered(3, 100, 16), sok::Filtered(3, 100, 32), sok::Filtered(3, 100, 64)}) {
    sok::AgreesWithTheCpu(policy, 0);
    sok::SnapshotsCrossOver(policy, 0);
    sok::ClearedTablesAreAsNew(policy);
  }
  for (const PolicyOptions& policy : {sok::Scored(ScoreKind::kLru), sok::Scored(ScoreKind::kLfu, 5),
                                      sok::Scored(ScoreKind::kCustom, 1000), all, bloom_lfu}) {
    sok::AgreesWithTheCpu(policy, 60);
    sok::AgreesWithTheCpu(policy, 20);
    sok::SnapshotsCrossOver(policy, 60);
    sok::ClearedTablesAreAsNew(policy);
    if (emulator::kEmulated) sok::WithoutMemoryNothingHappens(policy);
  }
  sok::AgreesWithTheCpu(sok::Filtered(2), 20);  // full without a score
  sok::PolicyOptions bounded = sok::Filtered(3);
  bounded.max_waiting = 16;
  sok::AgreesWithTheCpu(bounded, 0);
  for (const sok::OptimizerKind kind : {sok::OptimizerKind::kAdam, sok::OptimizerKind::kAdagrad,
                                        sok::OptimizerKind::kRowWiseAdagrad}) {
    sok::OptimizerOptions optimizer;
    optimizer.kind = kind;
    sok::UpdatesOfEvictingTables(optimizer);
  }
  sok::AWarmLookupWaitsOnce();
  sok::Errors();
  CHECK_EQ(emulator::bytes_allocated, 0);
}
