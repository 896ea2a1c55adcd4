// Which memory a table takes again.
#include "cpp/core/cpu/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cpp/core/cpu/index.h"
#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr size_t kPage = kHugePageBytes;

void BlocksAreTakenAgain() {
  BlockPool pool;
  bool is_zeroed = false;
  pool.Give(pool.Take(6 * kPage, &is_zeroed), /*keeps=*/false);  // from now on, so much may be kept
  Memory two = pool.Take(2 * kPage, &is_zeroed), odd = pool.Take(kPage + 5000, &is_zeroed);
  CHECK(is_zeroed);
  CHECK_EQ(odd.bytes(), kPage + 8192);
  void* const at = two.data();
  static_cast<char*>(at)[0] = 1;
  pool.Give(std::move(two));
  CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(2 * kPage));
  // In parts, which make one block again.
  Memory first = pool.Take(kPage, &is_zeroed);
  CHECK(!is_zeroed);
  Memory second = pool.Take(kPage, &is_zeroed);
  CHECK(!is_zeroed && pool.kept_bytes() == 0);
  pool.Give(std::move(first));
  pool.Give(std::move(second));
  two = pool.Take(2 * kPage, &is_zeroed);
  CHECK(!is_zeroed && two.data() == at);
  // A block that is not of whole pages serves its own size alone.
  void* const odd_at = odd.data();
  pool.Give(std::move(odd));
  Memory page = pool.Take(kPage, &is_zeroed);
  CHECK(is_zeroed);
  odd = pool.Take(kPage + 5000, &is_zeroed);
  CHECK(!is_zeroed && odd.data() == odd_at);
  // Nor is it joined: new blocks of one size lie side by side.
  std::vector<Memory> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(pool.Take(kPage + (i % 2) * 8192, &is_zeroed));
  for (Memory& block : blocks) pool.Give(std::move(block));
  for (int i = 0; i < 8; ++i) {
    blocks[i] = pool.Take(kPage + (i % 2) * 8192, &is_zeroed);
    CHECK(!is_zeroed);
  }
}

void NoMoreIsKeptThanWasUsedAtATime() {
  BlockPool pool;
  bool is_zeroed;
  for (int i = 0; i < 4; ++i) pool.Give(pool.Take(3 * kPage, &is_zeroed));
  CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(3 * kPage));
  // As an index grows: the new array is there before the old one goes.
  Memory large = pool.Take(4 * kPage, &is_zeroed);
  CHECK(is_zeroed);
  CHECK_EQ(pool.kept_bytes(), 0);
  pool.Give(std::move(large));
  CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(4 * kPage));
  // Only as much goes as is too much.
  Memory odd = pool.Take(kPage + 4096, &is_zeroed);
  CHECK(is_zeroed);
  CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(2 * kPage));
  pool.Give(std::move(odd), /*keeps=*/false);
  CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(2 * kPage));
}

// Two blocks share a slab, of one huge page or of three.
void SmallBlocksReadAsZero(size_t bytes) {
  BlockPool pool;
  std::vector<void*> blocks;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 5; ++i) {
      char* const block = static_cast<char*>(pool.Allocate(bytes));
      for (size_t b = 0; b < bytes; ++b) CHECK_EQ(block[b], 0);
      std::fill_n(block, bytes, static_cast<char>(1));
      blocks.push_back(block);
    }
    CHECK_EQ(pool.kept_bytes(), 0);
    CHECK_EQ(pool.idle_bytes(), static_cast<int64_t>(round * bytes));
    for (void* block : blocks) pool.Free(block, bytes);
    blocks.clear();
    CHECK_EQ(pool.kept_bytes(), static_cast<int64_t>(3 * 2 * bytes));
  }
}

void LargeIndexArraysAreZeroed() {
  BlockPool pool;
  bool is_zeroed;
  Memory used = pool.Take(2 * kPage, &is_zeroed);
  std::memset(used.data(), 0xFF, used.bytes());
  pool.Give(std::move(used));
  Index index;
  index.UsePool(&pool);
  index.MakeRoom(200000);
  CHECK_EQ(index.bytes(), static_cast<int64_t>(2 * kPage));
  CHECK_EQ(pool.kept_bytes(), 0);
  CHECK_EQ(index.Find(HashKey(~0ull), ~0ull), Index::kMissing);
}

TableOptions Options() {
  TableOptions options;
  options.name = "kept";
  options.dim = 16;
  return options;
}

// A cleared table, one whose content is replaced, and one that grows: right values in used memory.
void TablesAreRightInUsedMemory() {
  constexpr int64_t kKeys = 300000, kBatch = 20000;
  InlineExecutor ex;
  CpuTable table(Options()), fresh(Options());
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> rows(kBatch * 16), expected(kBatch * 16);
  const auto fill = [&](uint64_t first) {
    for (int64_t i = 0; i < kKeys; ++i) keys[i] = HashKey(first + static_cast<uint64_t>(i));
    for (int64_t b = 0; b < kKeys; b += kBatch) {
      table.FindOrInsert(ex, keys.data() + b, kBatch, rows.data(), nullptr);
      fresh.Find(ex, keys.data() + b, kBatch, expected.data(), nullptr);  // the initial rows
      CHECK(rows == expected);
    }
    CHECK_EQ(table.size(), kKeys);
    for (int64_t b = 0; b < kKeys; b += kBatch) {
      table.Find(ex, keys.data() + b, kBatch, rows.data(), nullptr);
      fresh.Find(ex, keys.data() + b, kBatch, expected.data(), nullptr);
      CHECK(rows == expected);
    }
    std::fill(rows.begin(), rows.end(), 7.0f);
    for (int64_t b = 0; b < kKeys; b += kBatch)
      table.Assign(ex, keys.data() + b, kBatch, rows.data());
  };
  fill(1);
  const int64_t bytes = table.Stats(ex).bytes;
  table.Clear(ex);
  CHECK(table.Stats(ex).bytes < 16 << 10);  // what is kept is the system's to take
  fill(kKeys / 2);
  CHECK(table.Stats(ex).bytes <= bytes + bytes / 10);
  const TableSnapshot snapshot = table.Export(ex, true);
  for (int i = 0; i < 3; ++i) table.Import(ex, snapshot, /*replace=*/true);
  for (int64_t b = 0; b < kKeys; b += kBatch) {
    table.Find(ex, keys.data() + b, kBatch, rows.data(), nullptr);
    CHECK_EQ(std::count(rows.begin(), rows.end(), 7.0f), kBatch * 16);
  }
}

// Rows of erased keys serve the next new keys, so that their floats do not stay.
void RowsOfErasedKeysAreTakenAgain() {
  InlineExecutor ex;
  CpuTable table(Options());
  std::vector<uint64_t> keys(100);
  for (uint64_t k = 0; k < 100; ++k) keys[k] = k;
  std::vector<uint32_t> before(100), after(100);
  table.FindOrInsertRows(ex, keys.data(), 100, before.data());
  std::fill_n(table.Row(before[40]), 16, 9.0f);
  table.Erase(ex, keys.data() + 40, 20);
  for (uint64_t& key : keys) key += 1000;
  table.FindOrInsertRows(ex, keys.data(), 20, after.data());
  for (int i = 0; i < 20; ++i) CHECK(after[i] >= 40 && after[i] < 60);
  CHECK(table.Row(40)[0] != 9.0f);
}

}  // namespace
}  // namespace sok

int main() {
  sok::BlocksAreTakenAgain();
  sok::NoMoreIsKeptThanWasUsedAtATime();
  sok::SmallBlocksReadAsZero(sok::kPage / 2);
  sok::SmallBlocksReadAsZero(3 * sok::kPage / 2);
  sok::LargeIndexArraysAreZeroed();
  sok::TablesAreRightInUsedMemory();
  sok::RowsOfErasedKeysAreTakenAgain();
}
