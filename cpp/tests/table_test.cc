// CpuTable: several threads at once, slots, catch-up, capacity. Contents against a dict are judged
// in Python.
#include "cpp/core/cpu/table.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

TableOptions Options(int64_t dim) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.seed = 7;
  return options;
}

std::vector<uint64_t> RandomKeys(int64_t n, uint64_t below, int seed) {
  std::mt19937_64 random(seed);
  std::vector<uint64_t> keys(n);
  for (uint64_t& key : keys) key = random() % below * 0x9E3779B97F4A7C15ull;
  return keys;
}

// Readers, inserters and an eraser on one table; each checks what must hold at any time.
void SeveralThreadsAtOnce() {
  CpuTable table(Options(4));
  ThreadPool pool(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 30; ++round) {
        const std::vector<uint64_t> keys = RandomKeys(3000, 5000, t * 100 + round);
        std::vector<float> rows(keys.size() * 4);
        std::vector<uint8_t> flags(keys.size());
        const int64_t n = static_cast<int64_t>(keys.size());
        if (t == 0) table.Find(pool, keys.data(), n, rows.data(), flags.data());
        if (t == 1 || t == 2) table.FindOrInsert(pool, keys.data(), n, rows.data(), flags.data());
        if (t == 3) table.Erase(pool, keys.data(), n / 4);
        if (t == 3 && round % 10 == 0) table.Stats(pool);
        if (t == 3) continue;
        // Nobody writes rows, so all of them are initial, found or not.
        float expected[4];
        for (int64_t i = 0; i < n; i += 97) {
          const std::shared_lock<TableMutex> lock(table.mutex());
          table.InitialRow(keys[i], expected);
          CHECK(std::memcmp(expected, &rows[i * 4], sizeof expected) == 0);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(table.size(), static_cast<int64_t>(table.Export(pool, true).keys.size()));
}

// Row numbers and exports must not depend on the number of threads.
void ThreadCountDoesNotShow() {
  std::vector<uint32_t> expected_rows;
  TableSnapshot expected;
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    CpuTable table(Options(5));
    std::vector<uint32_t> rows;
    for (int round = 0; round < 6; ++round) {
      const std::vector<uint64_t> keys = RandomKeys(20000, 30000, round);
      std::vector<uint32_t> numbers(keys.size());
      {
        const std::unique_lock<TableMutex> lock(table.mutex());
        table.FindOrInsertRows(pool, keys.data(), 20000, numbers.data());
      }
      rows.insert(rows.end(), numbers.begin(), numbers.end());
      table.Erase(pool, keys.data(), 5000);
    }
    TableSnapshot snapshot = table.Export(pool, true);
    if (num_threads == 1) {
      expected_rows = rows;
      expected = snapshot;
    }
    CHECK(rows == expected_rows);
    CHECK(snapshot.keys == expected.keys);
    CHECK(snapshot.rows == expected.rows);
  }
}

// Every present key has a row number of its own, and numbers stay dense as keys come and go.
void RowNumbersAreDense() {
  ThreadPool pool(2);
  CpuTable table(Options(1));
  for (int round = 0; round < 40; ++round) {
    // Every key three times: two of three reserved numbers are left over.
    std::vector<uint64_t> keys = RandomKeys(3000, 4000, round);
    keys.insert(keys.end(), keys.begin(), keys.end());
    std::vector<uint32_t> numbers(keys.size());
    {
      const std::unique_lock<TableMutex> lock(table.mutex());
      table.FindOrInsertRows(pool, keys.data(), 6000, numbers.data());
    }
    for (uint32_t n : numbers) CHECK(n < 4000 + 6000);
    if (round % 2) table.Erase(pool, keys.data() + round, 1500);
  }
  const std::vector<uint64_t> keys = table.Export(pool, false).keys;
  std::vector<uint32_t> numbers(keys.size());
  table.FindRows(pool, keys.data(), static_cast<int64_t>(keys.size()), numbers.data());
  std::sort(numbers.begin(), numbers.end());
  CHECK(std::unique(numbers.begin(), numbers.end()) == numbers.end());
}

void CapacityIsAllOrNothing() {
  ThreadPool pool(2);
  TableOptions options = Options(2);
  options.max_capacity = 100;
  CpuTable table(options);
  std::vector<uint64_t> keys;
  for (uint64_t k = 0; k < 90; ++k) keys.push_back(k);
  std::vector<float> rows(400);
  table.FindOrInsert(pool, keys.data(), 90, rows.data(), nullptr);
  for (uint64_t k = 0; k < 20; ++k) keys[k] = 1000 + k / 2 * 2;  // 10 new keys, twice each
  table.FindOrInsert(pool, keys.data(), 20, rows.data(), nullptr);
  CHECK_EQ(table.size(), 100);
  keys[3] = 5000;
  keys[4] = 5001;
  CHECK_THROWS(table.FindOrInsert(pool, keys.data(), 20, rows.data(), nullptr), std::length_error,
               "max_capacity=100. Received: 2 new keys at size 100 (table 't')");
  CHECK_THROWS(table.Assign(pool, keys.data(), 20, rows.data()), std::length_error, "'t'");
  CHECK_EQ(table.size(), 100);
  uint8_t found[1];
  table.Find(pool, &keys[3], 1, rows.data(), found);
  CHECK_EQ(found[0], 0);
}

void SlotsAreLaidBehindTheRow() {
  ThreadPool pool(2);
  CpuTable table(Options(3));
  const int64_t n = 200000;  // several chunks of either layout
  const std::vector<uint64_t> keys = RandomKeys(n, ~0ull, 1);
  std::vector<uint32_t> rows(n);
  std::vector<std::vector<float>> expected(n);
  const std::unique_lock<TableMutex> lock(table.mutex());
  table.FindOrInsertRows(pool, keys.data(), n, rows.data());
  table.LayOutSlots(pool, {{"m", 3, 0.5f, true}, {"last_step", 1, -1.0f, false}});
  CHECK_EQ(table.SlotOffset("m"), 3);
  CHECK_EQ(table.SlotOffset("last_step"), 6);
  CHECK_THROWS(table.SlotOffset("v"), std::out_of_range, "'v'");
  for (int64_t i = 0; i < n; ++i) {
    float* const row = table.Row(rows[i]);
    CHECK_EQ(row[3] + row[5], 1.0f);
    CHECK_EQ(row[6], -1.0f);
    for (int c = 0; c < 7; ++c) row[c] = static_cast<float>(rows[i] * 8 + c);
  }
  float* const before = table.Row(rows[0]);
  table.LayOutSlots(pool, {{"m", 3, 0.5f, true}, {"last_step", 1, -1.0f, false}});
  CHECK(before == table.Row(rows[0]));
  // Another order, a new slot, one of another width: m is kept, the others start anew.
  table.LayOutSlots(pool, {{"v", 10, 2.0f, true}, {"m", 3, 0.5f, true}, {"last_step", 2, 9.0f}});
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = table.Row(rows[i]);
    for (int c = 0; c < 3; ++c) {
      CHECK_EQ(row[c], static_cast<float>(rows[i] * 8 + c));
      CHECK_EQ(row[13 + c], static_cast<float>(rows[i] * 8 + 3 + c));
    }
    CHECK_EQ(row[3] + row[12] + row[16] + row[17], 22.0f);
  }
  CHECK_THROWS(table.LayOutSlots(pool, {{"a", 1}, {"a", 1}}), std::invalid_argument, "twice");
  CHECK_THROWS(table.LayOutSlots(pool, {{"a", 0}}), std::invalid_argument, "positive");
}

// A rule of which every row grows by 1 a step; slot 0 holds the step it was last brought up to.
class AddOnePerStep final : public RowCatchUp {
 public:
  std::string ToString() const override { return "add_one_per_step"; }
  explicit AddOnePerStep(int64_t dim) : dim_(dim) {}
  bool pending() const override { return step > 0; }
  void Apply(float* row) const override {
    Read(row, row);
    row[dim_] = static_cast<float>(step);
  }
  void Read(const float* row, float* out) const override {
    for (int64_t c = 0; c < dim_; ++c) out[c] = row[c] + (static_cast<float>(step) - row[dim_]);
  }
  void Rebase() override {
    ++num_rebases;
    step = 0;
  }
  int64_t step = 0;
  int num_rebases = 0;

 private:
  const int64_t dim_;
};

void RowsCatchUpWhenRead(bool use_hashtable) {
  ThreadPool pool(2);
  TableOptions options = Options(2);
  options.initializer.kind = InitializerKind::kConstant;
  options.initializer.a = 10.0f;
  options.use_hashtable = use_hashtable;
  options.max_capacity = use_hashtable ? 0 : 8;
  CpuTable table(options);
  auto catch_up = std::make_shared<AddOnePerStep>(2);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    table.LayOutSlots(pool, {{"last_step", 1, 0.0f, false}});
    table.AttachCatchUp(catch_up);
  }
  const std::vector<uint64_t> keys = {1, 2, 5};
  std::vector<float> rows(6);
  table.FindOrInsert(pool, keys.data(), 2, rows.data(), nullptr);
  CHECK_EQ(rows[3], 10.0f);
  catch_up->step = 3;
  table.Find(pool, keys.data(), 3, rows.data(), nullptr);
  for (float v : rows) CHECK_EQ(v, 13.0f);
  const float assigned[2] = {100.0f, 101.0f};
  table.Assign(pool, keys.data(), 1, assigned);
  catch_up->step = 5;
  table.FindOrInsert(pool, keys.data(), 3, rows.data(), nullptr);
  CHECK_EQ(rows[0], 102.0f);
  CHECK_EQ(rows[3], 15.0f);
  CHECK_EQ(rows[5], 15.0f);
  const TableSnapshot snapshot = table.Export(pool, true);
  CHECK_EQ(catch_up->num_rebases, 1);
  CHECK_EQ(snapshot.slot_names.size(), 0u);
  const size_t at = use_hashtable ? 0 : 2;  // key 1
  CHECK_EQ(snapshot.keys.size(), use_hashtable ? 3u : 8u);
  CHECK_EQ(snapshot.rows[at], 102.0f);
  CHECK_EQ(snapshot.rows.back(), 15.0f);
  if (!use_hashtable) {
    // Never touched, yet of the same age as the rest.
    const uint64_t untouched = 7;
    table.Find(pool, &untouched, 1, rows.data(), nullptr);
    CHECK_EQ(rows[0], 15.0f);
  }
}

void ImportKeepsSlotsUntilAnOptimizerAttaches() {
  ThreadPool pool(2);
  CpuTable table(Options(1));
  TableSnapshot snapshot;
  snapshot.keys = {4, 9};
  snapshot.rows = {1.0f, 2.0f};
  snapshot.slot_names = {"velocity", "momentum"};
  snapshot.slot_widths = {1, 2};
  snapshot.slot_rows = {5, 6, 7, 8, 9, 10};
  table.Import(pool, snapshot);
  {
    const std::unique_lock<TableMutex> lock(table.mutex());
    table.LayOutSlots(pool, {{"momentum", 2, 0.0f, true}, {"step", 1, 3.0f, true}});
  }
  TableSnapshot back = table.Export(pool, true);
  CHECK(back.keys == snapshot.keys);
  CHECK(back.rows == snapshot.rows);
  CHECK(back.slot_rows == std::vector<float>({6, 7, 3, 9, 10, 3}));
  snapshot.slot_widths = {1, 1};
  snapshot.slot_rows.resize(4);
  CHECK_THROWS(table.Import(pool, snapshot), std::invalid_argument, "width 2. Received: 1");
  snapshot.rows.pop_back();
  CHECK_THROWS(table.Import(pool, snapshot), std::invalid_argument, "`rows`");
}

void SmallTablesStaySmall() {
  ThreadPool pool(2);
  CpuTable table(Options(16));
  CHECK(table.Stats(pool).bytes < 16 << 10);
  const std::vector<uint64_t> keys = RandomKeys(100, ~0ull, 5);
  std::vector<float> rows(1600);
  table.FindOrInsert(pool, keys.data(), 100, rows.data(), nullptr);
  CHECK(table.Stats(pool).bytes < 40 << 10);
  table.Clear(pool);
  CHECK(table.Stats(pool).bytes < 16 << 10);
}

// Row numbers are recalled once, for the very keys remembered, and only while they are right.
void RecallsRowsUntilTheyMayChange() {
  InlineExecutor ex;
  const uint64_t keys[] = {5, 6, 7}, others[] = {5, 7, 6}, other = 99;
  std::vector<float> row(4);
  for (int change = 0; change < 6; ++change) {
    CpuTable table(Options(4));
    CHECK(!table.RecallRows(ex, keys, 0));
    Scratch<uint32_t> rows(3);
    table.FindOrInsertRows(ex, keys, 3, rows.get());
    CHECK(!table.RecallRows(ex, keys, 3));  // not asked to remember
    const std::vector<uint32_t> expected(rows.get(), rows.get() + 3);
    table.RememberRows(ex, keys, 3, std::move(rows));
    CHECK(!table.RecallRows(ex, others, 3));
    CHECK(!table.RecallRows(ex, keys, 2));
    if (change == 0) table.Erase(ex, keys, 1);
    if (change == 1) table.Clear(ex);
    if (change == 2) table.FindOrInsert(ex, &other, 1, row.data(), nullptr);
    if (change == 3) table.Import(ex, TableSnapshot(), /*replace=*/true);
    if (change == 4) table.Assign(ex, keys, 1, row.data());  // of a key that is there
    const Scratch<uint32_t> recalled = table.RecallRows(ex, keys, 3);
    CHECK_EQ(static_cast<bool>(recalled), change >= 4);
    if (recalled) CHECK(std::equal(expected.begin(), expected.end(), recalled.get()));
    CHECK(!table.RecallRows(ex, keys, 3));
  }
}

}  // namespace
}  // namespace sok

int main() {
  sok::RecallsRowsUntilTheyMayChange();
  sok::SeveralThreadsAtOnce();
  sok::ThreadCountDoesNotShow();
  sok::RowNumbersAreDense();
  sok::CapacityIsAllOrNothing();
  sok::SlotsAreLaidBehindTheRow();
  sok::RowsCatchUpWhenRead(true);
  sok::RowsCatchUpWhenRead(false);
  sok::ImportKeepsSlotsUntilAnOptimizerAttaches();
  sok::SmallTablesStaySmall();
}
