// New keys: how a batch is inserted by several threads without locks and without order.
//
//     missing positions, grouped by shard      -> all work below is by shard
//     1  make room in each shard's index          may fail; no key has been added
//     2  row numbers: as many as misses, shard after shard, free ones first, then from the counter
//     3  insert; a repeated key finds the row of its first position
//     4  row numbers left over by repeated keys go back
//
// Everything that can throw happens before step 3. Row numbers depend on the batch alone, not on
// how many threads took part.
#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>

#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kBlock = 32;

int64_t CountDistinct(const uint64_t* keys, const uint32_t* positions, int64_t n) {
  std::vector<uint64_t> sorted(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) sorted[i] = keys[positions[i]];
  std::sort(sorted.begin(), sorted.end());
  return std::unique(sorted.begin(), sorted.end()) - sorted.begin();
}

}  // namespace

void CpuTable::Impl::CheckCapacity(const uint64_t* keys, const ShardGroups& misses) const {
  const int64_t most = options.max_capacity > 0 ? options.max_capacity : int64_t{kNoRow};
  if (size + misses.total() <= most) return;
  const int64_t num_new = CountDistinct(keys, misses.positions.data(), misses.total());
  if (size + num_new <= most) return;
  throw std::length_error("A table must not grow beyond max_capacity=" + std::to_string(most) +
                          ". Received: " + std::to_string(num_new) + " new keys at size " +
                          std::to_string(size) + " (table '" + options.name + "')");
}

// Writes the initial rows and slot rows of new keys.
void CpuTable::Impl::WriteNewRows(const uint64_t* keys, const uint32_t* rows, int64_t num_keys) {
  // Rows of 16 bits are made here; nothing may fail any more, so it is not the heap.
  float embeddings[kMaxNarrowDim];
  const bool narrow = format.is_narrow();
  const int64_t block = narrow ? std::min(kBlock, kMaxNarrowDim / options.dim) : kBlock;
  float* pointers[kBlock];
  for (int64_t begin = 0; begin < num_keys; begin += block) {
    const int64_t n = std::min(block, num_keys - begin);
    for (int64_t i = 0; i < n; ++i) {
      pointers[i] = narrow ? embeddings + i * options.dim : arena->Row(rows[begin + i]);
    }
    InitialEmbeddings(keys + begin, n, pointers);
    for (int64_t i = 0; narrow && i < n; ++i)
      format.Write(pointers[i], arena->Row(rows[begin + i]));
    if (slot_initial.empty()) continue;
    for (int64_t i = 0; i < n; ++i) {
      std::copy(slot_initial.begin(), slot_initial.end(),
                arena->Row(rows[begin + i]) + format.embedding_floats());
    }
  }
}

// Puts a row that the caller has instead of an initial one.
void CpuTable::Impl::WriteGivenRow(const float* given, bool is_new, uint32_t row_number) {
  float* const row = arena->Row(row_number);
  if (is_new) {
    std::copy(slot_initial.begin(), slot_initial.end(), row + format.embedding_floats());
  }
  if (Pending()) catch_up->Apply(row);  // the slot rows must not owe the given row anything
  WriteRow(given, row);
}

int64_t CpuTable::Impl::InsertMissing(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                      uint32_t* rows, uint8_t* inserted, ShardGroups* misses,
                                      const float* given) {
  if (std::find(rows, rows + num_keys, kNoRow) == rows + num_keys) {  // mostly
    *misses = ShardGroups();
    return 0;
  }
  GroupByShard(ex, keys, num_keys, [rows](int64_t i) { return rows[i] == kNoRow; }, misses);
  const int64_t total = misses->total();
  if (!options.use_hashtable) return InsertDirect(ex, keys, rows, *misses);
  CheckCapacity(keys, *misses);

  const int64_t grain = ShardGrain(total);
  bool has_room = true;  // mostly: then no thread need be woken
  for (int s = 0; s < kNumShards; ++s) has_room = has_room && shards[s].HasRoom(misses->count(s));
  ex.ParallelFor(has_room ? 0 : kNumShards, grain, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      int64_t count = misses->count(s);
      if (shards[s].HasRoom(count)) continue;
      if (count > shards[s].size()) {
        // Repeated keys must not make the index grow by more than one doubling.
        count = CountDistinct(keys, misses->positions.data() + misses->offsets[s], count);
      }
      shards[s].MakeRoom(count);
    }
  });

  const int64_t from_free = std::min<int64_t>(total, static_cast<int64_t>(free_rows.size()));
  const uint32_t* const free_end = free_rows.data() + free_rows.size();
  const int64_t first_row = next_row;
  if (first_row + (total - from_free) > int64_t{kNoRow}) {
    throw std::length_error("A table must not hold more than 2^32 - 1 rows (table '" +
                            options.name + "')");
  }
  arena->Reserve(first_row + (total - from_free));
  const auto reserved = [=](int64_t i) {
    return i < from_free ? free_end[-1 - i] : static_cast<uint32_t>(first_row + (i - from_free));
  };

  if (arena->is_on_disk()) {
    std::vector<uint32_t> new_rows(static_cast<size_t>(total));
    for (int64_t i = 0; i < total; ++i) new_rows[i] = reserved(i);
    arena->Bring(ex, new_rows.data(), total, RowUse::kWrite);
  }

  ++version;
  int64_t used[kNumShards];  // row numbers that the shard took
  ex.ParallelFor(kNumShards, grain, [&](int64_t begin, int64_t end) {
    uint64_t hashes[kBlock];
    uint64_t new_keys[kBlock];
    uint32_t new_rows[kBlock];
    for (int64_t s = begin; s < end; ++s) {
      Index& shard = shards[s];
      int64_t next = misses->offsets[s];
      for (int64_t b = misses->offsets[s]; b < misses->offsets[s + 1]; b += kBlock) {
        const uint32_t* const positions = misses->positions.data() + b;
        const int n = static_cast<int>(std::min<int64_t>(kBlock, misses->offsets[s + 1] - b));
        for (int i = 0; i < n; ++i) {
          hashes[i] = HashKey(keys[positions[i]]);
          const char* const home = reinterpret_cast<const char*>(shard.Home(hashes[i]));
          for (size_t line = 0; line < sizeof(Bucket); line += 64) {
            __builtin_prefetch(home + line, 1);
          }
          if (given != nullptr) PrefetchRow<false>(given + positions[i] * options.dim, options.dim);
        }
        int num_new = 0;
        for (int i = 0; i < n; ++i) {
          const uint64_t key = keys[positions[i]];
          const uint32_t row = shard.FindOrInsert(hashes[i], key, reserved(next));
          rows[positions[i]] = row;
          const bool is_new = row == reserved(next);
          if (given != nullptr) WriteGivenRow(given + positions[i] * options.dim, is_new, row);
          if (!is_new) continue;
          ++next;
          if (inserted != nullptr) inserted[positions[i]] = 1;
          new_keys[num_new] = key;
          new_rows[num_new++] = row;
        }
        if (given == nullptr) WriteNewRows(new_keys, new_rows, num_new);
      }
      used[s] = next - misses->offsets[s];
    }
  });

  int64_t num_inserted = 0;
  int64_t end_used = 0;  // one past the last reserved number in use
  for (int s = 0; s < kNumShards; ++s) {
    num_inserted += used[s];
    if (used[s] > 0) end_used = misses->offsets[s] + used[s];
  }
  std::vector<uint32_t> left_over;
  try {
    left_over.reserve(static_cast<size_t>(std::max(end_used, from_free) - num_inserted));
    for (int s = kNumShards - 1; s >= 0; --s) {  // lowest last, to be taken first
      for (int64_t i = misses->offsets[s + 1] - 1; i >= misses->offsets[s] + used[s]; --i) {
        if (i < std::max(end_used, from_free)) left_over.push_back(reserved(i));
      }
    }
    // Only now: `reserved` reads free_rows, which may move.
    free_rows.reserve(free_rows.size() - static_cast<size_t>(from_free) + left_over.size());
  } catch (const std::bad_alloc&) {
    left_over.clear();  // these row numbers are lost until Clear, which is better than failing here
  }
  free_rows.resize(free_rows.size() - static_cast<size_t>(from_free));
  free_rows.insert(free_rows.end(), left_over.begin(), left_over.end());
  next_row = first_row + std::max<int64_t>(0, end_used - from_free);
  size += num_inserted;
  if (changes != nullptr) {
    for (uint32_t position : misses->positions) changes->Touch(&keys[position], &rows[position], 1);
  }
  return num_inserted;
}

int64_t CpuTable::Impl::InsertDirect(Executor& ex, const uint64_t* keys, uint32_t* rows,
                                     const ShardGroups& misses) {
  std::vector<uint64_t> new_keys;
  std::vector<uint32_t> new_rows;
  new_keys.reserve(misses.positions.size());
  new_rows.reserve(misses.positions.size());
  for (uint32_t position : misses.positions) {
    new_rows.push_back(DirectRow(keys[position]));
    arena->ReserveRow(new_rows.back());
  }
  arena->Bring(ex, new_rows.data(), misses.total(), RowUse::kWrite);
  new_rows.clear();
  for (uint32_t position : misses.positions) {
    const uint32_t row = DirectRow(keys[position]);
    rows[position] = row;
    if (IsPresent(row)) continue;  // an equal key came before
    present_words()[row / 64] |= uint64_t{1} << (row % 64);
    new_keys.push_back(keys[position]);
    new_rows.push_back(row);
  }
  ++version;
  const int64_t num_new = static_cast<int64_t>(new_keys.size());
  ex.ParallelFor(num_new, 1024, [&](int64_t begin, int64_t end) {
    WriteNewRows(new_keys.data() + begin, new_rows.data() + begin, end - begin);
  });
  Touch(new_keys.data(), new_rows.data(), num_new);
  return 0;  // no key is new to such a table
}

void CpuTable::Impl::ReserveIndex(Executor& ex, int64_t num_keys) {
  // Keys spread over shards like balls over bins: four standard deviations of room.
  const double mean = static_cast<double>(num_keys) / kNumShards;
  const int64_t target = static_cast<int64_t>(std::ceil(mean + 4 * std::sqrt(mean)));
  ex.ParallelFor(kNumShards, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (target > shards[s].size()) shards[s].MakeRoom(target - shards[s].size());
    }
  });
}

void CpuTable::Impl::Clear() {
  ++version;
  for (Index& shard : shards) shard.Clear();
  arena->Clear();
  std::vector<uint32_t>().swap(free_rows);
  std::vector<uint64_t>().swap(remembered_keys);
  std::vector<uint32_t>().swap(remembered_rows);
  next_row = 0;
  if (options.use_hashtable) {
    size = 0;
  } else {
    std::memset(present.data(), 0, present.bytes());
  }
  ForgetSteps();  // no row owes anything any more
  if (records != nullptr) records->Clear();
  if (changes != nullptr) changes->TouchAll();
  step_number.ResumeFrom(-1);
}

}  // namespace sok
