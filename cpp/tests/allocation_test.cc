// Every allocation of a call is made to fail in turn: the table must stay as it was, and the call
// must succeed once memory is there again.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

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

void* operator new(size_t bytes) { return Allocate(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t a) {
  return Allocate(bytes, static_cast<size_t>(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

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
  CHECK(failures > 60);  // among them the growth of most shards
  CHECK_EQ(table.size(), num_keys / 2);

  const std::vector<float> assigned(rows.size(), 2.0f);
  const std::vector<uint64_t> more = {1, 2, 3, 1};
  CHECK(FailEveryAllocation(&table, &pool,
                            [&] { table.Assign(pool, more.data(), 4, assigned.data()); }) > 2);
  table.Erase(pool, more.data(), 4);
  CHECK(FailEveryAllocation(&table, &pool, [&] {
          const std::unique_lock<std::shared_mutex> lock(table.mutex());
          table.ConfigureSlots(pool, {{"m", kDim, 0.5f, true}});
        }) > 2);
  CHECK_EQ(table.Export(pool, true).slot_rows.size(), rows.size() / 2);
  CHECK(FailEveryAllocation(&table, &pool, [&] { table.Erase(pool, keys.data(), 1000); }) > 2);
  CHECK_EQ(table.size(), num_keys / 2 - 500);
}

}  // namespace
}  // namespace sok

int main() { sok::Run(); }
