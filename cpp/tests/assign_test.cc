// Batches that mix present, new and repeated keys, against std::map: Assign, and the short cut for
// batches of which a sample is all new.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "cpp/core/cpu/optimizer_state.h"
#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr int64_t kDim = 3;
constexpr int64_t kSample = 64;  // keys that decide whether a batch counts as all new

TableOptions Options() {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.seed = 7;
  return options;
}

using Expected = std::map<uint64_t, float>;  // first element of each row; the others follow it

class Batch {
 public:
  explicit Batch(std::vector<uint64_t> batch_keys) : keys(std::move(batch_keys)) {
    static float next = 0.0f;
    for (size_t i = 0; i < keys.size(); ++i) {
      next += 1.0f;
      for (int64_t d = 0; d < kDim; ++d) rows.push_back(next + static_cast<float>(d) / 4);
    }
  }
  int64_t size() const { return static_cast<int64_t>(keys.size()); }
  void Assign(Executor& ex, CpuTable* table, Expected* expected) const {
    table->Assign(ex, keys.data(), size(), rows.data());
    for (size_t i = 0; i < keys.size(); ++i) (*expected)[keys[i]] = rows[i * kDim];
  }

  std::vector<uint64_t> keys;
  std::vector<float> rows;
};

void CheckContents(Executor& ex, CpuTable* table, const Expected& expected) {
  const TableSnapshot snapshot = table->Export(ex, false);
  CHECK_EQ(snapshot.keys.size(), expected.size());
  CHECK_EQ(table->size(), static_cast<int64_t>(expected.size()));
  size_t i = 0;
  for (const auto& [key, first] : expected) {
    CHECK_EQ(snapshot.keys[i], key);
    for (int64_t d = 0; d < kDim; ++d) {
      CHECK_EQ(snapshot.rows[i * kDim + d], first + static_cast<float>(d) / 4);
    }
    ++i;
  }
}

// Row numbers of different keys differ, those of one key agree.
void CheckRowNumbers(const std::vector<uint64_t>& keys, const std::vector<uint32_t>& numbers) {
  std::map<uint64_t, uint32_t> number_of;
  std::set<uint32_t> used;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto [it, is_first] = number_of.emplace(keys[i], numbers[i]);
    CHECK_EQ(it->second, numbers[i]);
    if (is_first) CHECK(used.insert(numbers[i]).second);
  }
}

uint64_t OldKey(uint64_t i) { return i * 0x9E3779B97F4A7C15ull; }
uint64_t NewKey(uint64_t i) { return OldKey(1000000 + i); }

enum class Mix {
  kSampleNewRestPresent,
  kSamplePresentRestNew,
  kSampleNewRestRepeated,  // the sampled keys again and again
  kOneKey,
  kAllNew,
  kHalfNew,
  kTwoOfSamplePresent,   // still counts as all new
  kThreeOfSamplePresent  // no longer does
};
constexpr Mix kMixes[] = {Mix::kSampleNewRestPresent,
                          Mix::kSamplePresentRestNew,
                          Mix::kSampleNewRestRepeated,
                          Mix::kOneKey,
                          Mix::kAllNew,
                          Mix::kHalfNew,
                          Mix::kTwoOfSamplePresent,
                          Mix::kThreeOfSamplePresent};

// Of `num_keys` keys, OldKey(0 .. num_keys - 1) are present.
std::vector<uint64_t> MixedKeys(Mix mix, int64_t num_keys) {
  std::vector<uint64_t> keys(num_keys);
  const int64_t stride = num_keys / kSample;
  for (int64_t i = 0; i < num_keys; ++i) {
    const bool sampled = i % stride == 0 && i / stride < kSample;
    const int64_t place = i / stride;
    switch (mix) {
      case Mix::kSampleNewRestPresent:
        keys[i] = sampled ? NewKey(i) : OldKey(i);
        break;
      case Mix::kSamplePresentRestNew:
        keys[i] = sampled ? OldKey(i) : NewKey(i);
        break;
      case Mix::kSampleNewRestRepeated:
        keys[i] = NewKey(sampled ? i : i % kSample * stride);
        break;
      case Mix::kOneKey:
        keys[i] = NewKey(0);
        break;
      case Mix::kAllNew:
        keys[i] = NewKey(i);
        break;
      case Mix::kHalfNew:
        keys[i] = i * 7 % 13 < 6 ? OldKey(i) : NewKey(i / 3);
        break;
      case Mix::kTwoOfSamplePresent:
        keys[i] = sampled && place < 2 ? OldKey(i) : NewKey(i);
        break;
      case Mix::kThreeOfSamplePresent:
        keys[i] = sampled && place < 3 ? OldKey(i) : NewKey(i);
        break;
    }
  }
  return keys;
}

void AssignOfMixedKeys(Mix mix, int64_t num_keys) {
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    CpuTable table(Options());
    Expected expected;
    std::vector<uint64_t> keys(num_keys);
    for (int64_t i = 0; i < num_keys; ++i) keys[i] = OldKey(i);
    const Batch old_rows(keys);
    old_rows.Assign(pool, &table, &expected);
    const Batch batch(MixedKeys(mix, num_keys));
    batch.Assign(pool, &table, &expected);
    batch.Assign(pool, &table, &expected);  // now all present
    CheckContents(pool, &table, expected);
  }
}

void InsertOfMixedKeys(Mix mix, int64_t num_keys) {
  const std::vector<uint64_t> keys = MixedKeys(mix, num_keys);
  std::vector<uint32_t> first_numbers;
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    CpuTable table(Options());
    Expected expected;
    std::vector<uint64_t> old_keys(num_keys);
    for (int64_t i = 0; i < num_keys; ++i) old_keys[i] = OldKey(i);
    const Batch old_rows(old_keys);
    old_rows.Assign(pool, &table, &expected);
    std::vector<uint32_t> numbers(keys.size());
    {
      const std::unique_lock<TableMutex> lock(table.mutex());
      table.FindOrInsertRows(pool, keys.data(), num_keys, numbers.data());
      CheckRowNumbers(keys, numbers);
      for (int64_t i = 0; i < num_keys; ++i) {
        float initial[kDim];
        table.InitialRow(keys[i], initial);
        const auto old_row = expected.find(keys[i]);
        CHECK_EQ(table.Row(numbers[i])[0],
                 old_row == expected.end() ? initial[0] : old_row->second);
      }
    }
    std::set<uint64_t> all(old_keys.begin(), old_keys.end());
    all.insert(keys.begin(), keys.end());
    CHECK_EQ(table.size(), static_cast<int64_t>(all.size()));
    if (num_threads == 1) first_numbers = numbers;
    CHECK(numbers == first_numbers);
  }
}

// Few free row numbers, and a batch of which most positions repeat: what is left over outgrows the
// list of free numbers while that is still being read.
void FreeNumbersAndLeftOvers() {
  for (int64_t num_erased : {1, 3, 10, 100, 700}) {
    for (int64_t copies : {2, 3, 50}) {
      ThreadPool pool(2);
      CpuTable table(Options());
      Expected expected;
      std::vector<uint64_t> keys;
      for (int64_t i = 0; i < 3000; ++i) keys.push_back(OldKey(i));
      Batch(keys).Assign(pool, &table, &expected);
      table.Erase(pool, keys.data(), num_erased);
      for (int64_t i = 0; i < num_erased; ++i) expected.erase(keys[i]);
      for (int round = 0; round < 3; ++round) {
        std::vector<uint64_t> repeated;
        for (int64_t copy = 0; copy < copies; ++copy) {
          for (int64_t i = 0; i < 500; ++i) repeated.push_back(NewKey(round * 1000 + i));
        }
        Batch(repeated).Assign(pool, &table, &expected);
        CheckContents(pool, &table, expected);
      }
      std::vector<uint64_t> all;
      for (const auto& entry : expected) all.push_back(entry.first);
      std::vector<uint32_t> numbers(all.size());
      table.FindRows(pool, all.data(), static_cast<int64_t>(all.size()), numbers.data());
      CheckRowNumbers(all, numbers);
    }
  }
}

// Also where the row belonged to a key that is gone.
void NewRowsGetInitialSlots() {
  ThreadPool pool(2);
  CpuTable table(Options());
  Expected expected;
  std::vector<uint64_t> keys;
  for (int64_t i = 0; i < 4096; ++i) keys.push_back(OldKey(i));
  Batch(keys).Assign(pool, &table, &expected);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    table.LayOutSlots(pool, {{"a", 1, 0.5f, true}});
    std::vector<uint32_t> numbers(keys.size());
    table.FindRows(pool, keys.data(), 4096, numbers.data());
    for (uint32_t number : numbers) table.Row(number)[kDim] = 9.0f;
  }
  table.Erase(pool, keys.data() + 2048, 2048);
  Batch(MixedKeys(Mix::kHalfNew, 2048)).Assign(pool, &table, &expected);
  Batch(MixedKeys(Mix::kAllNew, 2048)).Assign(pool, &table, &expected);
  keys = MixedKeys(Mix::kAllNew, 4096);
  std::vector<float> rows(keys.size() * kDim);
  table.FindOrInsert(pool, keys.data(), 4096, rows.data(), nullptr);
  std::set<uint64_t> old_keys;
  for (int64_t i = 0; i < 2048; ++i) old_keys.insert(OldKey(i));
  const TableSnapshot snapshot = table.Export(pool, true);
  CHECK_EQ(snapshot.keys.size(), 2048u + 4096u);
  for (size_t i = 0; i < snapshot.keys.size(); ++i) {
    CHECK_EQ(snapshot.slot_rows[i], old_keys.count(snapshot.keys[i]) > 0 ? 9.0f : 0.5f);
  }
}

// The number of different new keys decides, to the key, whatever repeats or is present.
void CloseToMaxCapacity(bool sample_is_new) {
  constexpr int64_t kOld = 5000, kBatch = 4096;
  const int64_t num_new_keys = sample_is_new ? kSample : 300;
  for (const int64_t room : {num_new_keys - 1, num_new_keys, num_new_keys + 1}) {
    ThreadPool pool(2);
    TableOptions options = Options();
    options.max_capacity = kOld + room;
    CpuTable table(options);
    Expected expected;
    std::vector<uint64_t> keys;
    for (int64_t i = 0; i < kOld; ++i) keys.push_back(OldKey(i));
    Batch(keys).Assign(pool, &table, &expected);
    std::vector<uint64_t> mixed(kBatch);
    for (int64_t i = 0; i < kBatch; ++i)
      mixed[i] = i % 3 == 0 ? OldKey(i) : NewKey(i % num_new_keys);
    if (sample_is_new) mixed = MixedKeys(Mix::kSampleNewRestPresent, kBatch);
    const std::set<uint64_t> distinct(mixed.begin(), mixed.end());
    int64_t num_new = 0;
    for (uint64_t key : distinct) num_new += expected.count(key) == 0;
    const Batch batch(mixed);
    if (num_new <= room) {
      batch.Assign(pool, &table, &expected);
    } else {
      CHECK_THROWS(batch.Assign(pool, &table, &expected), std::length_error,
                   "Received: " + std::to_string(num_new) + " new keys at size 5000 (table 't')");
    }
    CheckContents(pool, &table, expected);
  }
}

// An assigned row owes nothing for the steps before, however its key stood in the batch.
void AssignUnderPendingSteps(double beta_2, bool use_hashtable) {
  OptimizerOptions options;
  options.kind = OptimizerKind::kAdam;
  options.beta_2 = static_cast<float>(beta_2);
  options.weight_decay = 0.1f;
  ThreadPool pool(2);
  TableOptions table_options = Options();
  table_options.use_hashtable = use_hashtable;
  table_options.max_capacity = use_hashtable ? 0 : 20000;
  CpuTable table(table_options);
  const auto state = std::make_shared<OptimizerState>(options, kDim);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    table.LayOutSlots(pool, OptimizerSlots(options, kDim));
    table.AttachCatchUp(state);
  }
  Expected expected;
  std::vector<uint64_t> keys;
  for (uint64_t i = 0; i < 2000; ++i) keys.push_back(i);
  Batch(keys).Assign(pool, &table, &expected);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    std::vector<uint32_t> numbers(keys.size());
    table.FindRows(pool, keys.data(), 2000, numbers.data());
    for (uint32_t number : numbers) {
      for (int64_t d = 0; d < kDim; ++d) table.Row(number)[kDim + d] = 5.0f;  // momentum
    }
    for (int step = 1; step <= 5; ++step) {
      state->history().Reserve();
      state->history().Append(0.5, step);
    }
  }
  keys.clear();
  for (uint64_t i = 0; i < 4000; ++i) keys.push_back(i * 37 % 3000);  // present, new and repeated
  for (uint64_t i = 4000; i < 12000; ++i) keys.push_back(i);          // new
  const Batch batch(keys);
  batch.Assign(pool, &table, &expected);
  std::vector<float> rows(keys.size() * kDim);
  table.Find(pool, keys.data(), batch.size(), rows.data(), nullptr);
  for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(rows[i * kDim], expected[keys[i]]);
  // In a row that was there the momentum of steps 1 to 5 has decayed; a new one has none.
  const std::unique_lock<TableMutex> lock(table.mutex());
  const std::vector<uint64_t> two = {1, 2500};
  uint32_t numbers[2];
  table.FindRows(pool, two.data(), 2, numbers);
  const float decayed = table.Row(numbers[0])[kDim];
  CHECK(std::abs(decayed - 5.0 * std::pow(0.9, 5)) < 1e-5);
  CHECK_EQ(table.Row(numbers[1])[kDim], 0.0f);
  CHECK_EQ(state->LastStep(table.Row(numbers[0])), 5u);
  CHECK_EQ(state->LastStep(table.Row(numbers[1])), 5u);
}

// What a lookup returns for a new key is what the table then holds.
void FindOrInsertKeepsWhatItReturned(bool pending) {
  OptimizerOptions options;
  options.kind = OptimizerKind::kMomentum;
  options.momentum = 0.5f;
  options.weight_decay = 0.1f;
  ThreadPool pool(2);
  CpuTable table(Options());
  const auto state = std::make_shared<OptimizerState>(options, kDim);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    table.LayOutSlots(pool, {{"momentum", kDim, 0.0f, true}, {"last_step", 1, 0.0f, false}});
    table.AttachCatchUp(state);
    if (pending) {
      state->history().Reserve();
      state->history().Append(0.5, 1);
    }
  }
  for (Mix mix : kMixes) {
    const std::vector<uint64_t> keys = MixedKeys(mix, 4096);
    std::vector<float> rows(keys.size() * kDim), again(rows.size());
    std::vector<uint8_t> found(keys.size());
    table.FindOrInsert(pool, keys.data(), 4096, rows.data(), nullptr);
    table.Find(pool, keys.data(), 4096, again.data(), found.data());
    CHECK(rows == again);
    CHECK(std::count(found.begin(), found.end(), 1) == 4096);
    const std::shared_lock<TableMutex> lock(table.mutex());
    for (size_t i = 0; i < keys.size(); ++i) {
      float initial[kDim];
      table.InitialRow(keys[i], initial);
      CHECK(std::equal(initial, initial + kDim, &rows[i * kDim]));
    }
  }
}

}  // namespace
}  // namespace sok

int main() {
  for (sok::Mix mix : sok::kMixes) {
    for (int64_t num_keys : {1000, 1024, 1100, 20000}) {  // from 1024 on there is a sample
      sok::AssignOfMixedKeys(mix, num_keys);
      sok::InsertOfMixedKeys(mix, num_keys);
    }
  }
  sok::FreeNumbersAndLeftOvers();
  sok::CloseToMaxCapacity(false);
  sok::CloseToMaxCapacity(true);
  sok::NewRowsGetInitialSlots();
  for (bool use_hashtable : {true, false}) {
    sok::AssignUnderPendingSteps(0.999, use_hashtable);  // replayed as a series
    sok::AssignUnderPendingSteps(0.5, use_hashtable);    // step by step
  }
  sok::FindOrInsertKeepsWhatItReturned(false);
  sok::FindOrInsertKeepsWhatItReturned(true);
}
