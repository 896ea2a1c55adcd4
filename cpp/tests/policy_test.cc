// Policies: sizes and decisions, the queue by score against sorting, filters, and tables that keep
// records under several threads. Long random runs against a model are in Python.
#include "cpp/core/policy.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpp/core/cpu/admission.h"
#include "cpp/core/cpu/eviction_queue.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/hash.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

using Keys = std::vector<uint64_t>;

TableOptions Options(const PolicyOptions& policy, int64_t max_capacity) {
  TableOptions options;
  options.name = "t";
  options.dim = 2;
  options.max_capacity = max_capacity;
  options.policy = policy;
  return options;
}

void Observe(CpuTable& table, const Keys& keys) {
  InlineExecutor ex;
  table.RecordTrainingLookup(ex, keys.data(), static_cast<int64_t>(keys.size()));
}

Keys Present(CpuTable& table) {
  InlineExecutor ex;
  return table.Export(ex, false).keys;
}

// n = 1,000,000 and p = 1%: 9.585 counters a key and 6.64 of them used, by the formulas' own terms.
void SizesOfBloomFilters() {
  CHECK_EQ(SizeOfBloomFilter(1000000, 0.01).num_counters, 9585059);
  CHECK_EQ(SizeOfBloomFilter(1000000, 0.01).num_hashes, 7);
  CHECK_EQ(SizeOfBloomFilter(1000, 0.5).num_counters, 1443);
  CHECK_EQ(SizeOfBloomFilter(1000, 0.5).num_hashes, 1);
  CHECK_EQ(SizeOfBloomFilter(1, 0.999).num_counters, 1);
  CHECK_EQ(SizeOfBloomFilter(1, 0.999).num_hashes, 1);
  CHECK_EQ(SizeOfBloomFilter(10, 1e-300).num_hashes, kMaxBloomHashes);
}

void Decisions() {
  CHECK(!IsOutlived(100, 0, 0));
  CHECK(!IsOutlived(12, 10, 2));
  CHECK(IsOutlived(13, 10, 2));
  CHECK(!IsOutlived(5, 10, 2));  // the step was set back
  const float row[3] = {3.0f, -4.0f, 0.5f};
  CHECK_EQ(HalfSumOfSquares(row, 2), 12.5);
  CHECK_EQ(HalfSumOfSquares(row, 3), 12.625);
  CHECK_EQ(HalfSumOfSquares(row, 0), 0.0);
  CHECK(ParseScoreKind("lfu") == ScoreKind::kLfu);
  CHECK_THROWS(ParseScoreKind("LFU"), std::invalid_argument, "'LFU'");
  PolicyOptions policy;
  CHECK(!policy.keeps_records());
  policy.filter_freq = 1;
  CHECK(!policy.filters() && !policy.keeps_records());
  policy.filter_freq = 2;
  CHECK(policy.filters() && policy.keeps_records());
}

// Scores rise and fall, keys come and go; what is taken must be what sorting says.
void QueueAgainstSorting() {
  std::mt19937_64 random(3);
  EvictionQueue queue;
  queue.Reserve(6000);
  std::map<uint32_t, std::pair<int64_t, uint64_t>> scores;  // row -> score and key
  uint64_t next_key = 0;
  for (int round = 0; round < 3000; ++round) {
    const uint32_t row = static_cast<uint32_t>(random() % 50);
    const int64_t score = static_cast<int64_t>(random() % 20) - 10;
    auto it = scores.find(row);
    if (it == scores.end()) {
      scores[row] = {score, ~next_key++};  // large keys first come: unsigned order shows
      queue.Push({score, scores[row].second, row});
    } else if (random() % 4 == 0) {
      scores.erase(it);  // its entries stay in the queue
    } else {
      const bool falls = score < it->second.first;
      it->second.first = score;
      if (falls) queue.Push({score, it->second.second, row});
    }
    if (round % 7 != 0 || scores.size() < 5) continue;
    const auto is_kept = [](uint32_t r) { return r % 3 == 0; };
    std::vector<std::pair<int64_t, uint64_t>> expected;
    for (const auto& [r, item] : scores) {
      if (!is_kept(r)) expected.push_back(item);
    }
    std::sort(expected.begin(), expected.end());
    const int64_t count = std::min<int64_t>(3, static_cast<int64_t>(expected.size()));
    const std::vector<EvictionQueue::Entry> taken = queue.Take(
        count,
        [&](const EvictionQueue::Entry& entry) -> const int64_t* {
          const auto found = scores.find(entry.row);
          if (found == scores.end() || found->second.second != entry.key) return nullptr;
          return &found->second.first;
        },
        is_kept);
    CHECK_EQ(static_cast<int64_t>(taken.size()), count);
    for (int64_t i = 0; i < count; ++i) {
      CHECK_EQ(taken[i].score, expected[i].first);
      CHECK_EQ(taken[i].key, expected[i].second);
      scores.erase(taken[i].row);
    }
  }
}

void ExactFilterCountsAndForgets() {
  PolicyOptions policy;
  policy.filter_freq = 9;
  const auto filter = AdmissionFilter::Make(policy);
  const uint64_t key = ~uint64_t{0};
  const uint64_t hash = HashKey(key);
  CHECK_EQ(filter->CountWith(hash, key, 1), 1);
  filter->Reserve(HashShard(hash), 1);
  CHECK(filter->Count(hash, key, 1));
  CHECK(!filter->Count(hash, key, 1));  // within one step
  CHECK_EQ(filter->CountWith(hash, key, 1), 1);
  CHECK_EQ(filter->CountWith(hash, key, 2), 2);
  CHECK(filter->Count(hash, key, 5));
  CHECK_EQ(filter->Find(hash, key).count, 2);
  CHECK_EQ(filter->Find(hash, key).last_step, 5);
  filter->Expire(8, 3);
  CHECK_EQ(filter->num_waiting(), 1);
  filter->Expire(9, 3);
  CHECK_EQ(filter->num_waiting(), 0);
  // Many keys that come and go take the places of those before them.
  int64_t bytes = 0;
  for (int round = 0; round < 20; ++round) {
    for (uint64_t k = 0; k < 5000; ++k) {
      filter->Reserve(HashShard(HashKey(k)), 1);
      filter->Count(HashKey(k), k, round);
    }
    if (round == 1) bytes = filter->bytes();
    CHECK_EQ(filter->num_waiting(), 5000);
    for (uint64_t k = 0; k < 5000; ++k) filter->Forget(HashKey(k), k);
  }
  CHECK_EQ(filter->num_waiting(), 0);
  CHECK(filter->bytes() <= bytes + bytes / 4);
}

void SnapshotsHoldWhatIsKnown() {
  InlineExecutor ex;
  PolicyOptions policy;
  policy.filter_freq = 2;
  policy.score = ScoreKind::kCustom;
  CpuTable table(Options(policy, 10));
  Observe(table, {1, 2, 3});
  Observe(table, {1, 2});
  const Keys keys = {1};
  const int64_t scores[] = {-7};
  CHECK_EQ(table.AssignScores(ex, keys.data(), 1, scores), 1);
  const TableSnapshot snapshot = table.Export(ex, true);
  CHECK((snapshot.policy.records == std::vector<int64_t>{2, 2, -7, 2, 2, 0}));
  CHECK_EQ(snapshot.policy.waiting.size(), 1u);
  CHECK_EQ(snapshot.policy.waiting[0].key, 3u);
  CHECK_EQ(snapshot.policy.step, 2);
  CpuTable other(Options(policy, 10));
  Observe(other, {8});
  Observe(other, {8});
  other.Import(ex, snapshot, /*replace=*/true);
  CHECK((Present(other) == Keys{1, 2}));
  CHECK(other.Export(ex, true).policy.records == snapshot.policy.records);
  CHECK_EQ(other.Statistics(ex).written, 2);
  Observe(other, {3});
  CHECK((Present(other) == Keys{1, 2, 3}));  // seen before the snapshot, and now
  TableSnapshot bad = snapshot;
  bad.policy.records.pop_back();
  CHECK_THROWS(other.Import(ex, bad, true), std::invalid_argument, "3 values per key");
  CHECK((Present(other) == Keys{1, 2, 3}));
  other.ConfigureSlots(ex, {{"accumulator", 2, 0.0f, true}});
  bad = snapshot;
  bad.slot_names = {"accumulator"};
  bad.slot_widths = {1};
  bad.slot_rows.resize(2);
  CHECK_THROWS(other.Import(ex, bad), std::invalid_argument, "width 2");
  CHECK((Present(other) == Keys{1, 2, 3}));
}

// The queue gets the keys of a table in parts while it fills up, and anew if scores fall: the keys
// that stay are those that sorting all of them by step says.
void FillingUpInSmallCalls(bool falls) {
  InlineExecutor ex;
  PolicyOptions policy;
  policy.score = ScoreKind::kLru;
  CpuTable table(Options(policy, 4000));
  std::map<uint64_t, int64_t> last_steps;
  std::mt19937_64 random(5);
  uint64_t next_key = 0;
  int64_t step = 0;
  for (int round = 0; round < 1500; ++round) {
    if (falls && round % 400 == 399) table.SetStep(step = 0);
    ++step;
    std::set<uint64_t> batch;
    for (int i = 0; i < 9; ++i) batch.insert(next_key++ * 0x9E3779B97F4A7C15u);
    for (int i = 0; i < 9; ++i) batch.insert((random() % next_key) * 0x9E3779B97F4A7C15u);
    Observe(table, Keys(batch.begin(), batch.end()));
    for (uint64_t key : batch) last_steps[key] = step;
    std::vector<std::pair<int64_t, uint64_t>> others;
    for (const auto& [key, last] : last_steps) {
      if (batch.count(key) == 0) others.emplace_back(last, key);
    }
    const int64_t excess = static_cast<int64_t>(last_steps.size()) - 4000;
    std::sort(others.begin(), others.end());
    for (int64_t i = 0; i < excess; ++i) last_steps.erase(others[i].second);
    if (round % 3 == 0) {
      const Keys erased = {last_steps.begin()->first};
      table.Erase(ex, erased.data(), 1);
      last_steps.erase(erased[0]);
    }
    if (round % 50 != 0 && round != 1499) continue;
    Keys expected;
    for (const auto& [key, last] : last_steps) expected.push_back(key);
    CHECK(Present(table) == expected);
  }
  CHECK(table.Statistics(ex).evicted > 5000);
}

// Keys written by Assign make room by score too, and those of the call stay.
void WritingEvicts() {
  InlineExecutor ex;
  PolicyOptions policy;
  policy.score = ScoreKind::kLru;
  CpuTable table(Options(policy, 3));
  Observe(table, {1, 2});
  Observe(table, {1, 3});
  const Keys keys = {2, 9};
  const std::vector<float> rows(4, 0.5f);
  table.Assign(ex, keys.data(), 2, rows.data());
  CHECK((Present(table) == Keys{2, 3, 9}));  // 1 and 3 are of one step; 1 is the lower
  CHECK_EQ(table.Statistics(ex).written, 1);
  const Keys too_many = {20, 21, 22, 23};
  const std::vector<float> more(8, 0.5f);
  table.Assign(ex, too_many.data(), 4, more.data());
  CHECK((Present(table) == Keys{21, 22, 23}));  // all are of one step; 20 is the lowest
}

// Content that is added may lower a key's score, of which the queue has an earlier entry.
void AddedContentLowersScores() {
  InlineExecutor ex;
  PolicyOptions policy;
  policy.score = ScoreKind::kLru;
  CpuTable table(Options(policy, 3));
  for (uint64_t key = 1; key <= 4; ++key) Observe(table, {key});
  CHECK((Present(table) == Keys{2, 3, 4}));
  TableSnapshot snapshot;
  snapshot.keys = {4};
  snapshot.rows.resize(2);
  snapshot.policy.records = {1, 1, 0};  // last seen in step 1
  table.Import(ex, snapshot, /*replace=*/false);
  Observe(table, {5});
  CHECK((Present(table) == Keys{2, 3, 5}));
}

// Lookups, updates of all kinds and readers at once; counts add up in the end.
void SeveralThreadsAtOnce() {
  PolicyOptions policy;
  policy.filter_freq = 2;
  policy.steps_to_live = 20;
  policy.score = ScoreKind::kLfu;
  policy.evicted_buffer = 50;
  CpuTable table(Options(policy, 2000));
  ThreadPool pool(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int round = 0; round < 40; ++round) {
        Keys keys(900);
        for (uint64_t& key : keys) key = random() % 4000;
        const int64_t n = static_cast<int64_t>(keys.size());
        std::vector<float> rows(keys.size() * 2);
        std::vector<uint8_t> flags(keys.size());
        std::vector<int64_t> frequencies(keys.size()), steps(keys.size());
        if (t < 2) table.FindOrInsert(pool, keys.data(), n, rows.data(), flags.data());
        if (t == 2)
          table.KeyStatistics(pool, keys.data(), n, flags.data(), frequencies.data(), steps.data());
        if (t == 2) table.Statistics(pool);
        if (t == 3) table.Find(pool, keys.data(), n, rows.data(), flags.data());
        if (t == 3 && round % 4 == 0) table.Erase(pool, keys.data(), n / 8);
        if (t == 3 && round % 4 == 1) table.Evict(pool);
        if (t == 3 && round % 4 == 2) table.PopEvicted();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const PolicyCounts s = table.Statistics(pool);
  CHECK_EQ(s.step, 80);
  CHECK_EQ(s.size, table.size());
  CHECK_EQ(s.size, static_cast<int64_t>(Present(table).size()));
  CHECK_EQ(s.size, s.admitted + s.written - s.evicted - s.erased);
  CHECK_EQ(s.evicted, s.popped + s.buffered + s.dropped);
  CHECK_EQ(s.seen, s.found + s.admitted + s.refused);
  CHECK(s.evicted > 0 && s.refused > 0 && s.found > 0);
}

// A shard that grows while the keys of an instant are read, in several parts: each comes once, as it
// was.
void InstantOfAFilterThatGrows() {
  PolicyOptions policy;
  policy.filter_freq = 100;
  const auto filter = AdmissionFilter::Make(policy);
  Keys keys;  // of shard 0
  for (uint64_t key = 0; keys.size() < 60000; ++key) {
    if (HashShard(HashKey(key)) == 0) keys.push_back(key);
  }
  const auto count = [&](size_t first, size_t last, int64_t step) {
    filter->Reserve(0, static_cast<int64_t>(last - first));
    for (size_t i = first; i < last; ++i) filter->Count(HashKey(keys[i]), keys[i], step);
  };
  const auto forget = [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) filter->Forget(HashKey(keys[i]), keys[i]);
  };
  count(0, 21000, 1);
  forget(20000, 21000);  // places that are free at the instant
  const std::vector<WaitingKey> expected = filter->ExportKeys();
  const std::shared_ptr<WaitingInstant> instant = filter->BeginInstant();
  filter->ReadInstant();
  CHECK(!instant->is_whole());
  count(10000, 60000, 2);
  forget(5000, 15000);
  count(5000, 6000, 3);
  while (!instant->is_whole()) filter->ReadInstant();
  const std::vector<WaitingKey> found = instant->Take();
  CHECK_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    CHECK(found[i].key == expected[i].key && found[i].count == 1 && found[i].last_step == 1);
  }
}

}  // namespace
}  // namespace sok

int main() {
  sok::InstantOfAFilterThatGrows();
  sok::SizesOfBloomFilters();
  sok::Decisions();
  sok::QueueAgainstSorting();
  sok::ExactFilterCountsAndForgets();
  sok::SnapshotsHoldWhatIsKnown();
  sok::FillingUpInSmallCalls(false);
  sok::FillingUpInSmallCalls(true);
  sok::WritingEvicts();
  sok::AddedContentLowersScores();
  sok::SeveralThreadsAtOnce();
  return 0;
}
