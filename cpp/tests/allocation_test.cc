// Every allocation of a call is made to fail in turn: the table must stay as it was, and the call
// must succeed once memory is there again.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cpu/optimizer_state.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace {

std::atomic<int64_t> allocations_left{-1};  // negative: no failure

void* Allocate(size_t bytes, size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  void* const p = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

// Not inlined: the compiler would take free for the wrong partner of new.
#define NOINLINE __attribute__((noinline))
NOINLINE void* operator new(size_t bytes) { return Allocate(bytes, 16); }
NOINLINE void* operator new(size_t bytes, std::align_val_t a) {
  return Allocate(bytes, static_cast<size_t>(a));
}
NOINLINE void* operator new(size_t bytes, const std::nothrow_t&) noexcept try {
  return Allocate(bytes, 16);
} catch (const std::bad_alloc&) {
  return nullptr;
}
NOINLINE void operator delete(void* p) noexcept { std::free(p); }
NOINLINE void operator delete(void* p, size_t) noexcept { std::free(p); }
NOINLINE void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
NOINLINE void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace sok {
namespace {

constexpr int64_t kDim = 3;

template <typename Call>
int FailEveryAllocation(CpuTable* table, ThreadPool* pool, Call call) {
  const TableSnapshot before = table->Export(*pool, true);
  for (int64_t n = 0;; ++n) {
    try {
      allocations_left = n;
      call();
      allocations_left = -1;
      return static_cast<int>(n);
    } catch (const std::bad_alloc&) {
      allocations_left = -1;
      const TableSnapshot after = table->Export(*pool, true);
      CHECK(after.keys == before.keys);
      CHECK(after.rows == before.rows);
      CHECK(after.slot_rows == before.slot_rows);
      CHECK_EQ(table->size(), static_cast<int64_t>(before.keys.size()));
    }
  }
}

void Run() {
  ThreadPool pool(2);
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  CpuTable table(options);
  std::vector<uint64_t> keys(3000);
  std::vector<float> rows(keys.size() * kDim);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 2 * 77;
  const auto num_keys = static_cast<int64_t>(keys.size());

  table.FindOrInsert(pool, keys.data(), 100, rows.data(), nullptr);
  const int failures = FailEveryAllocation(&table, &pool, [&] {
    table.FindOrInsert(pool, keys.data(), num_keys, rows.data(), nullptr);
  });
  CHECK(failures > 10);  // among them the growth of shards, of which more succeed each time
  CHECK_EQ(table.size(), num_keys / 2);

  const std::vector<float> assigned(rows.size(), 2.0f);
  const std::vector<uint64_t> more = {1, 2, 3, 1};
  CHECK(FailEveryAllocation(&table, &pool,
                            [&] { table.Assign(pool, more.data(), 4, assigned.data()); }) > 2);
  table.Erase(pool, more.data(), 4);
  CHECK(FailEveryAllocation(&table, &pool, [&] {
          const std::unique_lock<TableMutex> lock(table.mutex());
          table.LayOutSlots(pool, {{"m", kDim, 0.5f, true}});
        }) > 2);
  CHECK_EQ(table.Export(pool, true).slot_rows.size(), rows.size() / 2);
  CHECK(FailEveryAllocation(&table, &pool, [&] { table.Erase(pool, keys.data(), 1000); }) > 2);
  CHECK_EQ(table.size(), num_keys / 2 - 500);
}

// A lookup and an assignment that evict: no key goes, and nothing is counted, unless all succeeds.
void Eviction() {
  ThreadPool pool(2);
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.max_capacity = 1000;
  options.policy.score = ScoreKind::kLfu;
  options.policy.filter_freq = 2;
  options.policy.count_occurrences = true;
  options.policy.evicted_buffer = 300;
  CpuTable table(options);
  std::vector<uint64_t> keys(900), more(400);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  for (size_t i = 0; i < more.size(); ++i) more[i] = i % 2 == 0 ? 5000 + i : 700 + i;
  std::vector<float> rows(keys.size() * kDim, 2.0f);
  for (int round = 0; round < 2; ++round) table.RecordTrainingLookup(pool, keys.data(), 900);
  table.RecordTrainingLookup(pool, more.data(), 400);
  const auto fail_all = [&](const auto& call, int64_t num_evicted) {
    const PolicyCounts before = table.Statistics(pool);
    const TableSnapshot content = table.Export(pool, true);
    CHECK(FailEveryAllocation(&table, &pool, [&] {
            const PolicyCounts now = table.Statistics(pool);
            CHECK(now.evicted == before.evicted && now.step == before.step &&
                  now.seen == before.seen && now.waiting == before.waiting &&
                  now.buffered == before.buffered);
            CHECK(table.Export(pool, true).policy.records == content.policy.records);
            call();
          }) > 5);
    CHECK_EQ(table.Statistics(pool).evicted, before.evicted + num_evicted);
  };
  fail_all([&] { table.RecordTrainingLookup(pool, more.data(), 400); }, 200);  // 300 are new
  std::vector<uint8_t> inserted(400);
  for (uint64_t& key : more) key += key >= 5000 ? 1000 : 0;
  table.RecordTrainingLookup(pool, more.data(), 400);
  fail_all([&] { table.FindOrInsert(pool, more.data(), 400, rows.data(), inserted.data()); }, 200);
  CHECK_EQ(std::count(inserted.begin(), inserted.end(), 1), 200);
  for (uint64_t& key : keys) key += 10000;
  fail_all([&] { table.Assign(pool, keys.data(), 300, rows.data()); }, 300);
}

// A group lookup: no table with policies has counted it, inserted or evicted unless all have, and the
// rows are combined then, too.
void GroupLookup() {
  std::vector<uint64_t> keys(40), more(80);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  for (size_t i = 0; i < more.size(); ++i) more[i] = 30 + i / 2;
  int64_t num_failures = 0;
  bool ran_out = true;  // of memory, which a call may survive
  for (int64_t n = 0; ran_out; ++n) {
    std::vector<std::unique_ptr<CpuTable>> tables;
    for (int t = 0; t < 4; ++t) {
      TableOptions options;
      options.name = "t" + std::to_string(t);
      options.dim = kDim;
      if (t != 1) options.max_capacity = 60;
      options.row_type = t == 3 ? RowType::kBfloat16 : RowType::kFloat32;
      if (t != 1) options.policy.score = ScoreKind::kLfu;
      if (t == 2) options.policy.filter_freq = 2;
      tables.push_back(std::make_unique<CpuTable>(options));
    }
    std::vector<CpuTable*> of_feature = {tables[0].get(), tables[1].get(), tables[2].get(),
                                         tables[3].get(), tables[2].get()};
    std::vector<std::vector<float>> out(5, std::vector<float>(more.size() * kDim));
    std::vector<std::vector<uint64_t>> unique(5, std::vector<uint64_t>(more.size()));
    std::vector<std::vector<int32_t>> inverse(5, std::vector<int32_t>(more.size()));
    const auto lookup = [&](const std::vector<uint64_t>& of_all) {
      std::vector<FeatureLookup> lookups(5);
      for (size_t f = 0; f < 5; ++f) {
        lookups[f].table = of_feature[f];
        lookups[f].keys = of_all.data();
        lookups[f].samples.num_keys = static_cast<int64_t>(of_all.size());
        lookups[f].samples.combiner = Combiner::kNone;
        lookups[f].unique_keys = unique[f].data();
        lookups[f].inverse = inverse[f].data();
        lookups[f].out = out[f].data();
      }
      InlineExecutor ex;
      LookupGroup(ex, &lookups, /*insert=*/true);
    };
    lookup(keys);
    InlineExecutor ex;
    bool failed = false;
    std::thread([&] {  // a new thread has no scratch memory left over
      try {
        allocations_left = n;
        lookup(more);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      ran_out = allocations_left < 0;
      allocations_left = -1;
    })
        .join();
    num_failures += failed;
    for (const auto& table : tables) {
      if (!table->keeps_records()) continue;
      const PolicyCounts counts = table->Statistics(ex);
      CHECK_EQ(counts.step, failed ? 1 : 2);
      CHECK_EQ(counts.evicted, failed || table->filters() ? 0 : 10);
      CHECK_EQ(counts.waiting, !table->filters() ? 0 : failed ? 40 : 60);
      CHECK_EQ(table->size(), table->filters() ? (failed ? 0 : 10) : failed ? 40 : 60);
    }
  }
  CHECK(num_failures > 20);
}

// A step of several tables: none has moved unless all have.
void StepOfSeveralTables() {
  ThreadPool pool(2);
  OptimizerOptions adam;
  adam.kind = OptimizerKind::kAdam;
  std::vector<std::unique_ptr<CpuTable>> tables;
  std::vector<TableGradients> batches;
  std::vector<uint64_t> keys(40), all(40);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 2 * 77, all[i] = i / 2 * 77;
  const std::vector<float> grads(keys.size() * kDim, 1.0f);
  for (int t = 0; t < 10; ++t) {
    TableOptions options;
    options.name = "t" + std::to_string(t);
    options.dim = kDim;
    tables.push_back(std::make_unique<CpuTable>(options));
    batches.push_back({tables[t].get(), keys.data(), grads.data(), 40});
  }
  ApplyGradients(pool, batches, adam, 0.1f, 1);
  tables[4]->step_number().ResumeFrom(100);   // so that tables count steps differently
  for (uint64_t& key : keys) key += 77 * 10;  // half of them are new
  const auto read = [&] {
    std::vector<std::vector<float>> rows;
    for (const auto& table : tables) {
      rows.emplace_back(all.size() * kDim);
      table->Find(pool, all.data(), all.size(), rows.back().data(), nullptr);
    }
    return rows;
  };
  const auto before = read();
  int64_t n = 0;
  for (bool failed = true; failed; ++n) {
    try {
      allocations_left = n;
      ApplyGradients(pool, batches, adam, 0.1f, 2);
      failed = false;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
    const auto after = read();
    for (size_t t = 0; t < after.size(); ++t) CHECK((after[t] == before[t]) == failed);
  }
  CHECK(n > 20);
}

// Batches large enough for pooled scratch memory.
void LargeBatch() {
  ThreadPool pool(2);
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  CpuTable table(options);
  std::vector<uint64_t> keys(40000);
  std::vector<float> rows(keys.size() * kDim, 1.5f);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 2 * 77;
  const auto num_keys = static_cast<int64_t>(keys.size());
  CHECK(FailEveryAllocation(&table, &pool,
                            [&] { table.Assign(pool, keys.data(), num_keys, rows.data()); }) > 5);
  CHECK_EQ(table.size(), num_keys / 2);
}

// Destructors give scratch memory back: that must not throw.
void ScratchIsReleasedWithoutMemory() {
  std::vector<Scratch<char>> blocks;
  for (int i = 0; i < 1000; ++i) blocks.emplace_back(64 << 10);
  allocations_left = 0;
  blocks.clear();
  CHECK(allocations_left < 0);  // it did ask for memory
}

// Rows are brought up to the present while new keys go in: that must not allocate.
void AssignToRowsThatOweSteps() {
  OptimizerOptions adam;
  adam.kind = OptimizerKind::kAdam;
  adam.beta_2 = 0.5f;  // replayed step by step
  adam.weight_decay = 0.1f;
  ThreadPool pool(2);
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  std::vector<uint64_t> keys(300);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 2 * 77;
  const std::vector<float> assigned(keys.size() * kDim, 2.0f);
  std::vector<float> before(assigned.size()), after(assigned.size());
  int64_t num_failures = 0;
  for (bool failed = true; failed; ++num_failures) {
    CpuTable table(options);
    const auto state = std::make_shared<OptimizerState>(adam, kDim);
    {
      const std::unique_lock<TableMutex> lock(table.mutex());
      table.LayOutSlots(pool, OptimizerSlots(adam, kDim));
      table.AttachCatchUp(state);
    }
    table.FindOrInsert(pool, keys.data(), 100, before.data(), nullptr);
    for (int step = 1; step <= 3; ++step) {
      state->history().Reserve();
      state->history().Append(0.5, step);
    }
    table.Find(pool, keys.data(), 300, before.data(), nullptr);
    try {
      allocations_left = num_failures;
      table.Assign(pool, keys.data(), 300, assigned.data());
      failed = false;
    } catch (const std::bad_alloc&) {
    }
    allocations_left = -1;
    table.Find(pool, keys.data(), 300, after.data(), nullptr);
    CHECK(after == (failed ? before : assigned));
    CHECK_EQ(table.size(), failed ? 50 : 150);
  }
  CHECK(num_failures > 10);
}

}  // namespace
}  // namespace sok

int main() {
  sok::Run();
  sok::LargeBatch();
  sok::Eviction();
  sok::GroupLookup();
  sok::StepOfSeveralTables();
  sok::ScratchIsReleasedWithoutMemory();
  sok::AssignToRowsThatOweSteps();
}
