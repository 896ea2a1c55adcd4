// Device tables: a call that throws has changed nothing, in none of its tables; equal new keys take
// one row, and Clear leaves nothing of before behind.
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

using Keys = std::vector<uint64_t>;
constexpr cuda::Stream kStream = nullptr;

Keys KeysFrom(uint64_t first, int64_t n) {
  Keys keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(first + i);
  return keys;
}

// What a caller may ask of a table, in one string.
std::string StateOf(cuda::CudaTable& table) {
  const TableSnapshot all = table.Export(kStream, true);
  std::string state = std::to_string(table.Size(kStream)) + ":";
  for (const uint64_t key : all.keys) state += " " + std::to_string(key);
  for (const float value : all.rows) state += " " + std::to_string(value);
  for (const int64_t value : all.policy.records) state += " " + std::to_string(value);
  for (const auto& waiting : all.policy.waiting) {
    state += " " + std::to_string(waiting.key) + "*" + std::to_string(waiting.count);
  }
  if (!table.keeps_records()) return state;
  const PolicyCounts counts = table.Statistics(kStream);
  for (const int64_t count : {counts.step, counts.seen, counts.admitted, counts.refused,
                              counts.evicted, counts.buffered, counts.dropped}) {
    state += " #" + std::to_string(count);
  }
  return state;
}

// A group of tables of each kind, the keys of their features, and what they hold.
struct Group {
  std::vector<std::unique_ptr<cuda::CudaTable>> tables;
  std::vector<cuda::CudaTable*> of_feature;

  // Tables of 60 keys: one that evicts, one that also filters, a plain one that two features name,
  // one without a hashtable, and two more that evict behind it.
  Group() {
    for (int t = 0; t < 6; ++t) {
      TableOptions options;
      options.name = "t" + std::to_string(t);
      options.dim = 4;
      options.max_capacity = t == 3 ? 1000 : 60;
      options.use_hashtable = t != 3;
      if (t != 2 && t != 3) options.policy.score = ScoreKind::kLfu;
      if (t == 1) options.policy.filter_freq = 2;
      if (t == 4) options.policy.evicted_buffer = 10;
      tables.push_back(std::make_unique<cuda::CudaTable>(options));
      of_feature.push_back(tables[t].get());
    }
    of_feature.push_back(tables[2].get());
    for (int i = 0; i < 2; ++i) Lookup(std::vector<Keys>(7, KeysFrom(0, 40)));
  }

  std::vector<std::vector<float>> Lookup(const std::vector<Keys>& keys) {
    std::vector<std::vector<float>> rows;
    std::vector<cuda::CudaTable::TableFind> batches;
    for (size_t f = 0; f < keys.size(); ++f) {
      rows.emplace_back(keys[f].size() * 4);
      batches.push_back(
          {of_feature[f], keys[f].data(), static_cast<int64_t>(keys[f].size()), rows[f].data()});
    }
    cuda::CudaTable::FindOrInsert(kStream, batches);
    return rows;
  }

  std::vector<std::string> State() const {
    std::vector<std::string> state;
    for (const auto& table : tables) state.push_back(StateOf(*table));
    return state;
  }
};

void AGroupThatThrowsHasChangedNothing() {
  struct Refused {
    size_t feature;
    Keys keys;
    const char* message;
  };
  const std::vector<Refused> each = {
      {6, KeysFrom(200, 10), "max_capacity=60. Received: 25 new keys at size 40 (table 't2')"},
      {3, {2000}, "'t3'"},
      {5, KeysFrom(100, 61), "'t5'"}};
  for (const Refused& refused : each) {
    Group group;
    const std::vector<std::string> before = group.State();
    // All make room, and some evict; the features of t2 together fill it.
    std::vector<Keys> keys(7, KeysFrom(100, 40));
    keys[2] = keys[6] = KeysFrom(100, 15);
    std::vector<Keys> bad = keys;
    bad[refused.feature] = refused.keys;
    for (int attempt = 0; attempt < 2; ++attempt) {
      bool threw = false;
      try {
        group.Lookup(bad);
      } catch (const std::exception& error) {
        threw = std::string(error.what()).find(refused.message) != std::string::npos;
      }
      CHECK(threw);
      CHECK(group.State() == before);
    }
    const auto rows = group.Lookup(keys);
    CHECK(rows[2] == rows[6]);
    CHECK_EQ(group.tables[0]->Statistics(kStream).evicted, 20);
    CHECK_EQ(group.tables[0]->Size(kStream), 60);
    CHECK_EQ(group.tables[1]->Statistics(kStream).waiting, 40);
    CHECK_EQ(group.tables[2]->Size(kStream), 55);
    CHECK_EQ(group.tables[4]->Statistics(kStream).buffered, 10);
  }
}

// Wherever device memory runs out.
void AGroupWithoutMemoryHasChangedNothing() {
  std::vector<Keys> keys(7, KeysFrom(100, 60));
  keys[2] = keys[6] = KeysFrom(100, 20);
  Group expected;
  const auto rows = expected.Lookup(keys);
  int64_t num_failures = 0;
  for (bool failed = true; failed; num_failures += failed) {
    Group group;
    const std::vector<std::string> before = group.State();
    emulator::allocations_left = num_failures;
    failed = false;
    try {
      CHECK(group.Lookup(keys) == rows);
    } catch (const cuda::DeviceMemoryError&) {
      failed = true;
    }
    emulator::allocations_left = INT64_MAX;
    CHECK(!failed || group.State() == before);
    if (failed) CHECK(group.Lookup(keys) == rows);
    CHECK(group.State() == expected.State());
  }
  CHECK(num_failures > 5);
}

// New keys of a step that fails are in no table.
void AStepWithoutMemoryHasChangedNothing() {
  const Keys keys = KeysFrom(0, 5000);
  const std::vector<float> grads(keys.size() * 4, 0.5f);
  OptimizerOptions adam;
  adam.kind = OptimizerKind::kAdam;
  int64_t num_failures = 0;
  for (bool failed = true; failed; num_failures += failed) {
    std::vector<std::unique_ptr<cuda::CudaTable>> tables;
    std::vector<cuda::TableGradients> first, step;
    for (int t = 0; t < 3; ++t) {
      TableOptions options;
      options.dim = 4;
      tables.push_back(std::make_unique<cuda::CudaTable>(options));
      first.push_back({tables[t].get(), keys.data(), grads.data(), 10});
      step.push_back({tables[t].get(), keys.data(), grads.data(), 5000});
    }
    cuda::ApplyGradients(kStream, first, adam, 0.1f, 1);
    std::vector<std::string> before;
    for (const auto& table : tables) before.push_back(StateOf(*table));
    emulator::allocations_left = num_failures;
    failed = false;
    try {
      cuda::ApplyGradients(kStream, step, adam, 0.1f, 2);
    } catch (const cuda::DeviceMemoryError&) {
      failed = true;
    }
    emulator::allocations_left = INT64_MAX;
    for (int t = 0; t < 3; ++t) {
      CHECK(!failed || StateOf(*tables[t]) == before[t]);
      CHECK(failed || tables[t]->Size(kStream) == 5000);
    }
  }
  CHECK(num_failures > 2);
}

void EqualKeysTakeOneRow() {
  TableOptions options;
  options.name = "t";
  options.dim = 256;  // 2048 rows per chunk
  constexpr int64_t kCopies = 5000;
  std::vector<uint64_t> keys(kCopies, 7);
  keys.front() = 6;
  keys.back() = 8;
  std::vector<float> rows(kCopies * options.dim, 1.0f);
  rows[(kCopies - 2) * options.dim] = 2.0f;  // of the last copy
  cuda::CudaTable table(options);
  table.Assign(kStream, keys.data(), kCopies, rows.data());
  std::vector<float> read(3 * options.dim);
  const std::vector<uint64_t> each = {6, 7, 8};
  table.Find(kStream, each.data(), 3, read.data(), nullptr);
  CHECK(read[0] == 1.0f && read[options.dim] == 2.0f && read[options.dim + 1] == 1.0f);
  CHECK_EQ(table.Size(kStream), 3);
  CHECK(table.Stats(kStream).arena_bytes < 3 << 20);
}

void ClearForgetsWeightDecay() {
  for (const bool use_hashtable : {true, false}) {
    TableOptions options;
    options.name = "t";
    options.dim = 4;
    options.initializer.kind = InitializerKind::kConstant;
    options.initializer.a = 1.0f;
    options.use_hashtable = use_hashtable;
    options.max_capacity = 10;
    cuda::CudaTable table(options);
    OptimizerOptions sgd;
    sgd.weight_decay = 0.1f;
    const std::vector<uint64_t> keys = {1}, other = {2};
    const std::vector<float> grads(4, 0.0f);
    std::vector<float> row(4);
    for (int step = 1; step <= 10; ++step) {
      cuda::ApplyGradients(kStream, {{&table, keys.data(), grads.data(), 1}}, sgd, 1.0f, step);
    }
    table.Find(kStream, other.data(), 1, row.data(), nullptr);
    CHECK(row[0] < 0.36f);
    table.Clear(kStream);
    for (const std::vector<uint64_t>& key : {keys, other}) {
      table.Find(kStream, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
      table.FindOrInsert(kStream, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
    }
    CHECK_EQ(table.InitialRowScale(kStream), 1.0);
  }
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::AGroupThatThrowsHasChangedNothing();
  if (emulator::kEmulated) {
    sok::AGroupWithoutMemoryHasChangedNothing();
    sok::AStepWithoutMemoryHasChangedNothing();
  }
  sok::EqualKeysTakeOneRow();
  sok::ClearForgetsWeightDecay();
}
