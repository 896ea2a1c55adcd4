// New keys: how a batch is inserted by several threads without locks and without order.
//
//     missing positions, grouped by shard
//     1  make room in each shard's index, by shard    may fail; no key has been added
//     2  row numbers: one per missing position, free ones first, then from the counter
//     3  insert, by shard; a repeated key finds the row of its first position
//     4  write the new rows
//     5  row numbers left over by repeated keys go back
//
// Everything that can throw happens before step 3. Row numbers depend on the batch alone, not on
// how many threads took part.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <new>
#include <stdexcept>

#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kRowGrain = 1024;  // rows worth handing to another thread

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
void CpuTable::Impl::WriteInitialRows(const uint64_t* keys, const uint32_t* rows,
                                      int64_t num_keys) {
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

// Row numbers for new keys, one per missing position. If the whole batch is missing, number i is for
// position i, so that given rows are read and new rows are written in order. Otherwise it is for
// place i of the grouping.
struct CpuTable::Impl::NewNumbers {
  const ShardGroups& misses;
  const bool by_position;
  const int64_t from_free;         // so many come from free_rows, beginning at its end
  const uint32_t* const free_end;  // which must not change meanwhile
  const int64_t first_row;         // the first of the others

  uint32_t operator[](int64_t i) const {
    return i < from_free ? free_end[-1 - i] : static_cast<uint32_t>(first_row + (i - from_free));
  }
  uint32_t Position(int64_t i) const {
    return by_position ? static_cast<uint32_t>(i) : misses.positions[i];
  }
  uint32_t OfPlace(int64_t place) const {  // in the grouping
    return (*this)[by_position ? misses.positions[place] : place];
  }
};

void CpuTable::Impl::InsertMissing(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                   uint32_t* rows, uint8_t* inserted, ShardGroups* misses,
                                   const float* given) {
  if (std::find(rows, rows + num_keys, kNoRow) == rows + num_keys) {  // mostly
    *misses = ShardGroups();
    return;
  }
  GroupByShard(ex, keys, num_keys, [rows](int64_t i) { return rows[i] == kNoRow; }, misses);
  const int64_t total = misses->total();
  if (!options.use_hashtable) return InsertDirect(ex, keys, rows, *misses);
  CheckCapacity(keys, *misses);
  MakeRoom(ex, keys, *misses);

  const int64_t num_free = static_cast<int64_t>(free_rows.size());
  const int64_t from_free = std::min(total, num_free);
  if (next_row + (total - from_free) > int64_t{kNoRow}) {
    throw std::length_error("A table must not hold more than 2^32 - 1 rows (table '" +
                            options.name + "')");
  }
  arena->Reserve(next_row + (total - from_free));
  const NewNumbers numbers{*misses, total == num_keys, from_free, free_rows.data() + num_free,
                           next_row};
  if (arena->is_on_disk()) {
    std::vector<uint32_t> new_rows(static_cast<size_t>(total));
    for (int64_t i = 0; i < total; ++i) new_rows[i] = numbers[i];
    arena->Bring(ex, new_rows.data(), total, RowUse::kWrite);
  }

  // Both are created before the first key is inserted, because creating them may fail.
  const std::function<void(int64_t, int64_t)> write_new = [&](int64_t begin, int64_t end) {
    WriteNewRows(keys, numbers, rows, given, begin, end);
  };
  // Equal keys are written by one thread, in order.
  const std::function<void(int64_t, int64_t)> write_shards = [&](int64_t begin, int64_t end) {
    for (int64_t i = misses->offsets[begin]; i < misses->offsets[end]; ++i) {
      const int64_t position = misses->positions[i];
      const bool is_new = rows[position] == numbers.OfPlace(i);
      WriteGivenRow(given + position * options.dim, is_new, rows[position]);
    }
  };

  const int64_t num_inserted = InsertIntoIndex(ex, keys, numbers, rows, inserted);
  if (given != nullptr && num_inserted < total) {
    ex.ParallelFor(kNumShards, ShardGrain(total), write_shards);
  } else {
    ex.ParallelFor(total, kRowGrain, write_new);
  }
  TakeBack(numbers, rows, num_inserted);
  size += num_inserted;
  if (changes != nullptr) {
    for (uint32_t position : misses->positions) changes->Touch(&keys[position], &rows[position], 1);
  }
}

void CpuTable::Impl::MakeRoom(Executor& ex, const uint64_t* keys, const ShardGroups& misses) {
  bool has_room = true;  // mostly: then no thread need be woken
  for (int s = 0; s < kNumShards; ++s) has_room = has_room && shards[s].HasRoom(misses.count(s));
  if (has_room) return;
  ex.ParallelFor(kNumShards, ShardGrain(misses.total()), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      int64_t count = misses.count(s);
      if (shards[s].HasRoom(count)) continue;
      if (count > shards[s].size()) {
        // Repeated keys must not make the index grow by more than one doubling.
        count = CountDistinct(keys, misses.positions.data() + misses.offsets[s], count);
      }
      shards[s].MakeRoom(count);
    }
  });
}

int64_t CpuTable::Impl::InsertIntoIndex(Executor& ex, const uint64_t* keys,
                                        const NewNumbers& numbers, uint32_t* rows,
                                        uint8_t* inserted) {
  const ShardGroups& misses = numbers.misses;
  std::atomic<int64_t> num_inserted{0};
  ++version;
  ex.ParallelFor(kNumShards, ShardGrain(misses.total()), [&](int64_t begin, int64_t end) {
    uint64_t hashes[kBlock];
    for (int64_t s = begin; s < end; ++s) {
      Index& shard = shards[s];
      const int64_t size_before = shard.size();
      for (int64_t b = misses.offsets[s]; b < misses.offsets[s + 1]; b += kBlock) {
        const uint32_t* const positions = misses.positions.data() + b;
        const int64_t n = std::min(kBlock, misses.offsets[s + 1] - b);
        for (int64_t i = 0; i < n; ++i) {
          hashes[i] = HashKey(keys[positions[i]]);
          __builtin_prefetch(shard.Home(hashes[i]), 1);
        }
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t position = positions[i], number = numbers.OfPlace(b + i);
          rows[position] = shard.FindOrInsert(hashes[i], keys[position], number);
          if (inserted != nullptr && rows[position] == number) inserted[position] = 1;
        }
      }
      num_inserted += shard.size() - size_before;
    }
  });
  return num_inserted;
}

// Writes the rows numbered [begin, end), except those that a repeated key has left over.
void CpuTable::Impl::WriteNewRows(const uint64_t* keys, const NewNumbers& numbers,
                                  const uint32_t* rows, const float* given, int64_t begin,
                                  int64_t end) {
  uint64_t new_keys[kBlock];
  uint32_t new_rows[kBlock];
  for (int64_t b = begin; b < end; b += kBlock) {
    int64_t num_new = 0;
    for (int64_t i = b; i < std::min(end, b + kBlock); ++i) {
      const int64_t position = numbers.Position(i);
      if (rows[position] != numbers[i]) continue;
      if (given != nullptr) {
        WriteGivenRow(given + position * options.dim, /*is_new=*/true, numbers[i]);
        continue;
      }
      new_keys[num_new] = keys[position];
      new_rows[num_new++] = numbers[i];
    }
    WriteInitialRows(new_keys, new_rows, num_new);
  }
}

void CpuTable::Impl::TakeBack(const NewNumbers& numbers, const uint32_t* rows,
                              int64_t num_inserted) {
  const int64_t total = numbers.misses.total(), from_free = numbers.from_free;
  const bool repeats = num_inserted < total;
  const auto is_used = [&](int64_t i) { return rows[numbers.Position(i)] == numbers[i]; };
  int64_t end_used = total;  // one past the last number in use
  while (repeats && end_used > 0 && !is_used(end_used - 1)) --end_used;
  std::vector<uint32_t> left_over;
  try {
    const int64_t end_kept = std::max(end_used, from_free);
    left_over.reserve(static_cast<size_t>(end_kept - num_inserted));
    for (int64_t i = end_kept - 1; repeats && i >= 0; --i) {  // lowest last, to be taken first
      if (!is_used(i)) left_over.push_back(numbers[i]);
    }
    // Only now: `numbers` reads free_rows, which may move.
    free_rows.reserve(free_rows.size() - static_cast<size_t>(from_free) + left_over.size());
  } catch (const std::bad_alloc&) {
    left_over.clear();  // these row numbers are lost until Clear, which is better than failing here
  }
  free_rows.resize(free_rows.size() - static_cast<size_t>(from_free));
  free_rows.insert(free_rows.end(), left_over.begin(), left_over.end());
  next_row += std::max<int64_t>(0, end_used - from_free);
}

// No key is new to such a table.
void CpuTable::Impl::InsertDirect(Executor& ex, const uint64_t* keys, uint32_t* rows,
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
    WriteInitialRows(new_keys.data() + begin, new_rows.data() + begin, end - begin);
  });
  Touch(new_keys.data(), new_rows.data(), num_new);
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
