// A call that throws has changed nothing, in none of its tables; one that does not leaves nothing of
// before behind.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr int64_t kDim = 256;  // 2048 rows per chunk of 2 MiB
constexpr int64_t kChunk = 2 << 20;

std::string Folder() { return std::filesystem::current_path().string() + "/half_step_test_rows"; }

// A table on disk that may take so many chunks.
TableOptions OnDisk(const std::string& name, int64_t chunks) {
  TableOptions options;
  options.name = name;
  options.dim = kDim;
  options.storage.path = Folder();
  options.storage.memory_bytes = 1 << 20;
  options.storage.file_bytes = chunks * kChunk;
  return options;
}

std::vector<uint64_t> Keys(uint64_t first, int64_t n) {
  std::vector<uint64_t> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

void AStepIsMadeByAllTablesOrNone() {
  for (const int num_tables : {2, 20}) {  // one after the other, and side by side
    ThreadPool pool(2);
    std::vector<std::unique_ptr<CpuTable>> tables;
    std::vector<TableSnapshot> before;
    std::vector<TableGradients> batches;
    const std::vector<uint64_t> keys = Keys(0, 100), more = Keys(1000, 3000);
    const std::vector<float> grads(3000 * kDim, 1.0f);
    const OptimizerOptions sgd;
    for (int t = 0; t < num_tables; ++t) {
      tables.push_back(std::make_unique<CpuTable>(OnDisk("t" + std::to_string(t), 1)));
      ApplyGradients(pool, *tables[t], sgd, 0.1f, 1, keys.data(), grads.data(), 100);
      batches.push_back({tables[t].get(), keys.data(), grads.data(), 100});
      before.push_back(tables[t]->Export(pool, true));
    }
    batches.back().keys = more.data();  // 3000 new rows do not fit
    batches.back().num_keys = num_tables == 2 ? 3000 : 2048;
    CHECK_THROWS(ApplyGradients(pool, batches, sgd, 0.1f, 2), std::length_error, "storage_size");
    for (int t = 0; t < num_tables; ++t)
      CHECK(tables[t]->Export(pool, true).rows == before[t].rows);
  }
}

void ALookupThatThrowsHasEvictedNothing() {
  ThreadPool pool(2);
  TableOptions options = OnDisk("t", 1);
  options.max_capacity = 3000;
  options.policy.score = ScoreKind::kLru;
  CpuTable table(options);
  const std::vector<uint64_t> keys = Keys(0, 2048), more = Keys(5000, 2048);
  std::vector<float> rows(2048 * kDim);
  table.FindOrInsert(pool, keys.data(), 2048, rows.data(), nullptr);
  const auto lookup = [&] { table.FindOrInsert(pool, more.data(), 2048, rows.data(), nullptr); };
  CHECK_THROWS(lookup(), std::length_error, "storage_size");
  CHECK_THROWS(table.Assign(pool, more.data(), 2048, rows.data()), std::length_error,
               "storage_size");
  CHECK(table.Export(pool, false).keys == keys);
  const PolicyCounts counts = table.Statistics(pool);
  CHECK_EQ(counts.evicted, 0);
  CHECK_EQ(counts.step, 1);
  CHECK_EQ(counts.seen, 2048);
  // And what was to go can still go: as many keys as have room.
  table.FindOrInsert(pool, keys.data(), 1000, rows.data(), nullptr);
  options.storage.file_bytes = 2 * kChunk;
  CpuTable larger(options);
  larger.FindOrInsert(pool, keys.data(), 2048, rows.data(), nullptr);
  larger.FindOrInsert(pool, keys.data(), 1000, rows.data(), nullptr);
  larger.FindOrInsert(pool, more.data(), 2000, rows.data(), nullptr);
  CHECK_EQ(larger.size(), 3000);
  CHECK_EQ(larger.Statistics(pool).evicted, 1048);  // none of the first thousand
  CHECK(larger.Export(pool, false).keys[999] == 999);
}

// A group in which a table is full: those with policies have not counted the lookup.
void AGroupThatThrowsHasCountedNothing() {
  for (const int num_tables : {3, 20}) {
    ThreadPool pool(2);
    const std::vector<uint64_t> keys = Keys(0, 40), more = Keys(100, 40);
    std::vector<std::unique_ptr<CpuTable>> tables;
    for (int t = 0; t < num_tables; ++t) {
      TableOptions options;
      options.name = "t" + std::to_string(t);
      options.dim = 4;
      options.max_capacity = t == num_tables - 2 ? 50 : 60;
      if (t != num_tables - 2) {
        options.policy.score = ScoreKind::kLfu;
        if (t % 2 == 1) options.policy.filter_freq = 2;
      }
      tables.push_back(std::make_unique<CpuTable>(options));
    }
    std::vector<std::vector<float>> out(num_tables, std::vector<float>(40 * 4));
    std::vector<std::vector<uint64_t>> unique(num_tables, std::vector<uint64_t>(40));
    std::vector<std::vector<int32_t>> inverse(num_tables, std::vector<int32_t>(40));
    const auto lookup = [&](const std::vector<uint64_t>& looked_up) {
      std::vector<FeatureLookup> lookups(num_tables);
      for (int t = 0; t < num_tables; ++t) {
        lookups[t].table = tables[t].get();
        lookups[t].keys = looked_up.data();
        lookups[t].samples.num_keys = 40;
        lookups[t].samples.combiner = Combiner::kNone;
        lookups[t].unique_keys = unique[t].data();
        lookups[t].inverse = inverse[t].data();
        lookups[t].out = out[t].data();
      }
      LookupGroup(pool, &lookups, /*insert=*/true);
    };
    lookup(keys);
    std::vector<TableSnapshot> before;
    for (const auto& table : tables) before.push_back(table->Export(pool, true));
    for (int attempt = 0; attempt < 2; ++attempt) {
      CHECK_THROWS(lookup(more), std::length_error, "max_capacity=50");
      for (int t = 0; t < num_tables; ++t) {
        const TableSnapshot after = tables[t]->Export(pool, true);
        CHECK(after.keys == before[t].keys && after.rows == before[t].rows);
        CHECK(after.policy.records == before[t].policy.records);
        CHECK_EQ(after.policy.waiting.size(), before[t].policy.waiting.size());
        if (!tables[t]->keeps_records()) continue;
        CHECK_EQ(tables[t]->Statistics(pool).step, 1);
        CHECK_EQ(tables[t]->Statistics(pool).evicted, 0);
      }
    }
    // With room, it goes on where it was.
    tables[num_tables - 2]->Erase(pool, keys.data(), 40);
    lookup(more);
    CHECK_EQ(tables[0]->Statistics(pool).step, 2);
    CHECK_EQ(tables[0]->Statistics(pool).evicted, 20);
    CHECK_EQ(tables[0]->size(), 60);
  }
}

void EqualKeysTakeOneRow() {
  ThreadPool pool(2);
  constexpr int64_t kCopies = 200000;
  std::vector<uint64_t> keys(kCopies, 7);
  keys.front() = 6;  // so that the last row number would be high
  keys.back() = 8;
  std::vector<float> rows(kCopies * 4, 1.0f);
  rows[(kCopies - 2) * 4] = 2.0f;  // the last of the copies
  std::vector<uint8_t> inserted(kCopies);
  for (const bool on_disk : {false, true}) {
    for (const int call : {0, 1, 2}) {
      TableOptions options = OnDisk("t", 1);
      options.dim = 4;
      if (!on_disk) options.storage = StorageOptions();
      CpuTable table(options);
      std::vector<float> read(kCopies * 4);
      if (call == 0) {
        table.Assign(pool, keys.data(), kCopies, rows.data());
        table.Find(pool, keys.data(), kCopies, read.data(), nullptr);
        CHECK(read[4] == 2.0f && read[5] == 1.0f && read[0] == 1.0f);
      } else if (call == 1) {
        table.FindOrInsert(pool, keys.data(), kCopies, read.data(), inserted.data());
        CHECK_EQ(std::accumulate(inserted.begin(), inserted.end(), 0), 3);
        CHECK(inserted[0] && inserted[1] && inserted[kCopies - 1]);
      } else {
        const OptimizerOptions sgd;
        ApplyGradients(pool, table, sgd, 0.1f, 1, keys.data(), rows.data(), kCopies);
      }
      CHECK_EQ(table.size(), 3);
      CHECK(table.Stats(pool).bytes < 5 << 20);
      CHECK_EQ(table.row_bytes(), 3 * 4 * 4);
    }
  }
}

void ClearForgetsWeightDecay() {
  InlineExecutor ex;
  TableOptions options;
  options.name = "t";
  options.dim = 4;
  options.initializer.kind = InitializerKind::kConstant;
  options.initializer.a = 1.0f;
  for (const bool use_hashtable : {true, false}) {
    options.use_hashtable = use_hashtable;
    options.max_capacity = use_hashtable ? 0 : 10;
    CpuTable table(options);
    OptimizerOptions sgd;
    sgd.weight_decay = 0.1f;
    const std::vector<uint64_t> keys = {1}, other = {2};
    const std::vector<float> grads(4, 0.0f);
    for (int step = 1; step <= 10; ++step) {
      ApplyGradients(ex, table, sgd, 1.0f, step, keys.data(), grads.data(), 1);
    }
    std::vector<float> row(4);
    table.Find(ex, other.data(), 1, row.data(), nullptr);
    CHECK(row[0] < 0.36f);
    table.Clear(ex);
    for (const std::vector<uint64_t>& key : {keys, other}) {
      table.Find(ex, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
      table.FindOrInsert(ex, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
    }
    CHECK_EQ(table.InitialRowScale(ex), 1.0);
  }
}

}  // namespace
}  // namespace sok

int main() {
  std::filesystem::create_directories(sok::Folder());
  sok::AStepIsMadeByAllTablesOrNone();
  sok::ALookupThatThrowsHasEvictedNothing();
  sok::AGroupThatThrowsHasCountedNothing();
  sok::EqualKeysTakeOneRow();
  sok::ClearForgetsWeightDecay();
  std::filesystem::remove_all(sok::Folder());
  return 0;
}
