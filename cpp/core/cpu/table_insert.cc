// New keys: how a batch is inserted by several threads without locks and without order.
//
//     missing positions, grouped by shard
//     1  of equal keys the first position stays, by shard
//     2  choose keys to evict for them, if the table is full (table_evict.cc)
//     3  room in each shard's index; row numbers, free ones first, then from the counter; chunks
//     4  evict; insert, by shard
//     5  write the new rows; equal keys get the row of their first position
//
// Everything that can throw happens before step 4. So several tables can be made ready before the
// first of them changes. Row numbers depend on the batch alone, not on how many threads took part.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <stdexcept>

#include "cpp/core/cpu/local_table.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kRowGrain = 1024;  // rows worth handing to another thread

}  // namespace

void CpuTable::Impl::CheckCapacity(int64_t num_new, int64_t num_evicted, bool may_exceed) const {
  const bool bounded = options.max_capacity > 0 && !may_exceed;
  const int64_t most = bounded ? options.max_capacity : int64_t{kNoRow};
  if (size - num_evicted + num_new <= most) return;
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

// Row numbers for new keys. If the whole batch is new, number i is for position i, so that given rows
// are read and new rows are written in order. Otherwise it is for place i of the grouping.
struct CpuTable::Impl::NewNumbers {
  NewNumbers(const Impl& impl, const Insertion& insertion)
      : misses(insertion.misses),
        by_position(misses.total() == insertion.num_keys),
        from_free(std::min(misses.total(), static_cast<int64_t>(impl.free_rows.size()))),
        free_end(impl.free_rows.data() + impl.free_rows.size()),
        first_row(impl.next_row) {}

  uint32_t operator[](int64_t i) const {
    return i < from_free ? free_end[-1 - i] : static_cast<uint32_t>(first_row + (i - from_free));
  }
  uint32_t Position(int64_t i) const {
    return by_position ? static_cast<uint32_t>(i) : misses.positions[i];
  }
  uint32_t OfPlace(int64_t place) const {  // in the grouping
    return (*this)[by_position ? misses.positions[place] : place];
  }

  const ShardGroups& misses;
  const bool by_position;
  const int64_t from_free;         // so many come from free_rows, beginning at its end
  const uint32_t* const free_end;  // which must not change meanwhile
  const int64_t first_row;         // the first of the others
};

// Leaves the first position of each key in `misses`, and the others in `repeats`.
void CpuTable::Impl::DropRepeats(Executor& ex, Insertion* insertion) const {
  ShardGroups& all = insertion->misses;
  const int64_t total = all.total();
  Scratch<int32_t> local_ids(total);
  const Scratch<uint64_t> keys(total);
  int64_t num_unique[kNumShards];
  ex.ParallelFor(kNumShards, ShardGrain(total), [&](int64_t begin, int64_t end) {
    LocalTable table;
    for (int64_t s = begin; s < end; ++s) {
      const int64_t first = all.offsets[s], last = all.offsets[s + 1];
      for (int64_t i = first; i < last; ++i) keys[i] = insertion->keys[all.positions[i]];
      num_unique[s] =
          table.Run(keys.get() + first, last - first, keys.get() + first, local_ids.get() + first);
    }
  });
  ShardGroups firsts;
  for (int s = 0; s < kNumShards; ++s) firsts.offsets[s + 1] = firsts.offsets[s] + num_unique[s];
  if (firsts.total() == total) return;
  firsts.positions.resize(static_cast<size_t>(firsts.total()));
  insertion->last.resize(static_cast<size_t>(firsts.total()));
  ex.ParallelFor(kNumShards, ShardGrain(total), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      uint32_t* const first = firsts.positions.data() + firsts.offsets[s];
      uint32_t* const last = insertion->last.data() + firsts.offsets[s];
      int32_t seen = 0;
      for (int64_t i = all.offsets[s]; i < all.offsets[s + 1]; ++i) {
        const int32_t id = local_ids[i];
        if (id == seen) first[seen++] = all.positions[i];
        last[id] = all.positions[i];
      }
    }
  });
  insertion->repeats = std::move(all);
  insertion->local_ids = std::move(local_ids);
  all = std::move(firsts);
}

void CpuTable::Impl::PrepareInsert(Executor& ex, Insertion* insertion) {
  const uint32_t* const rows = insertion->rows;
  const int64_t num_keys = insertion->num_keys;
  if (std::find(rows, rows + num_keys, kNoRow) == rows + num_keys) return;  // mostly
  ShardGroups& misses = insertion->misses;
  GroupByShard(
      ex, insertion->keys, num_keys, [rows](int64_t i) { return rows[i] == kNoRow; }, &misses);
  if (!insertion->keys_are_unique) DropRepeats(ex, insertion);
  if (!options.use_hashtable) return ReserveDirect(ex, insertion->keys, misses);
  const int64_t total = misses.total();
  if (records != nullptr) {
    records->Reserve(next_row + total, total);
    ChooseEvicted(ex, total, *insertion, &insertion->eviction);
  }
  const int64_t num_evicted = insertion->eviction.size();
  CheckCapacity(total, num_evicted, insertion->may_exceed);
  MakeRoom(ex, misses);

  const int64_t num_free = static_cast<int64_t>(free_rows.size());
  const int64_t end_row = next_row + std::max<int64_t>(0, total - num_free - num_evicted);
  if (end_row > int64_t{kNoRow}) {
    throw std::length_error("A table must not hold more than 2^32 - 1 rows (table '" +
                            options.name + "')");
  }
  arena->Reserve(end_row);
  if (!arena->is_on_disk()) return;
  std::vector<uint32_t> new_rows;
  new_rows.reserve(static_cast<size_t>(num_evicted + num_free + end_row - next_row));
  for (const EvictionQueue::Entry& entry : insertion->eviction.entries) {
    new_rows.push_back(entry.row);
  }
  const int64_t from_free = std::min(num_free, std::max<int64_t>(0, total - num_evicted));
  new_rows.insert(new_rows.end(), free_rows.end() - from_free, free_rows.end());
  for (int64_t row = next_row; row < end_row; ++row) {
    new_rows.push_back(static_cast<uint32_t>(row));
  }
  arena->Bring(ex, new_rows.data(), static_cast<int64_t>(new_rows.size()), RowUse::kWrite);
}

void CpuTable::Impl::Insert(Executor& ex, Insertion* insertion) {
  const uint64_t* const keys = insertion->keys;
  uint32_t* const rows = insertion->rows;
  const ShardGroups& misses = insertion->misses;
  const int64_t total = misses.total();
  if (total == 0) return;
  if (options.use_hashtable) {
    EvictRows(&insertion->eviction);
    const NewNumbers numbers(*this, *insertion);
    const int64_t num_inserted = InsertIntoIndex(ex, keys, numbers, rows, insertion->inserted);
    for (int64_t i = 0; (instant != nullptr || changes != nullptr) && i < total; ++i) {
      const uint32_t position = misses.positions[i];
      const bool is_new = rows[position] == numbers.OfPlace(i);
      if (is_new && instant != nullptr) instant->Skip(rows[position]);
      Touch(ex, &keys[position], &rows[position], 1);
    }
    ex.ParallelFor(total, kRowGrain, [&](int64_t begin, int64_t end) {
      WriteNewRows(*insertion, numbers, begin, end);
    });
    TakeBack(numbers, rows, num_inserted);
    size += num_inserted;
  } else {
    InsertDirect(ex, keys, rows, misses);
  }
  const ShardGroups& repeats = insertion->repeats;
  ex.ParallelFor(kNumShards, ShardGrain(repeats.total()), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const uint32_t* const first = misses.positions.data() + misses.offsets[s];
      for (int64_t i = repeats.offsets[s]; i < repeats.offsets[s + 1]; ++i) {
        rows[repeats.positions[i]] = rows[first[insertion->local_ids[i]]];
      }
    }
  });
}

void CpuTable::Impl::InsertMissing(Executor& ex, Insertion* insertion) {
  PrepareInsert(ex, insertion);
  Insert(ex, insertion);
}

void CpuTable::Impl::MakeRoom(Executor& ex, const ShardGroups& misses) {
  // A table with a capacity may stay close to it, and need no more.
  const auto moves_ahead = [&](int s) {
    return options.max_capacity == 0 && misses.count(s) > 0 &&
           shards[s].IsAboutToDouble(misses.count(s));
  };
  int growing[kNumShards], num_growing = 0;  // mostly none: then no thread need be woken
  for (int s = 0; s < kNumShards; ++s) {
    if (!shards[s].HasRoom(misses.count(s)) || moves_ahead(s)) growing[num_growing++] = s;
  }
  ex.ParallelFor(num_growing, ShardGrain(misses.total()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int s = growing[i];
      shards[s].MakeRoom(misses.count(s));
      if (moves_ahead(s)) shards[s].MoveAhead(misses.count(s));
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

// Writes the rows numbered [begin, end). A key that was present after all (FindUnlessNew) has left
// its number over: only a given row is written, to the row that it has.
void CpuTable::Impl::WriteNewRows(const Insertion& insertion, const NewNumbers& numbers,
                                  int64_t begin, int64_t end) {
  uint64_t new_keys[kBlock];
  uint32_t new_rows[kBlock];
  for (int64_t b = begin; b < end; b += kBlock) {
    int64_t num_new = 0;
    for (int64_t i = b; i < std::min(end, b + kBlock); ++i) {
      const int64_t position = numbers.Position(i);
      const uint32_t row = insertion.rows[position];
      const bool is_new = row == numbers[i];
      if (insertion.given != nullptr) {
        const int64_t last = insertion.last.empty() ? position : insertion.last[i];
        WriteGivenRow(insertion.given + last * options.dim, is_new, row);
      } else if (is_new) {
        new_keys[num_new] = insertion.keys[position];
        new_rows[num_new++] = row;
      }
    }
    WriteInitialRows(new_keys, new_rows, num_new);
  }
}

void CpuTable::Impl::TakeBack(const NewNumbers& numbers, const uint32_t* rows,
                              int64_t num_inserted) {
  const int64_t total = numbers.misses.total(), from_free = numbers.from_free;
  const bool some_left = num_inserted < total;
  const auto is_used = [&](int64_t i) { return rows[numbers.Position(i)] == numbers[i]; };
  int64_t end_used = total;  // one past the last number in use
  while (some_left && end_used > 0 && !is_used(end_used - 1)) --end_used;
  std::vector<uint32_t> left_over;
  try {
    const int64_t end_kept = std::max(end_used, from_free);
    left_over.reserve(static_cast<size_t>(end_kept - num_inserted));
    for (int64_t i = end_kept - 1; some_left && i >= 0; --i) {  // lowest last, to be taken first
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
void CpuTable::Impl::ReserveDirect(Executor& ex, const uint64_t* keys, const ShardGroups& misses) {
  std::vector<uint32_t> rows;
  rows.reserve(misses.positions.size());
  for (uint32_t position : misses.positions) {
    rows.push_back(DirectRow(keys[position]));
    arena->ReserveRow(rows.back());
  }
  arena->Bring(ex, rows.data(), misses.total(), RowUse::kWrite);
}

void CpuTable::Impl::InsertDirect(Executor& ex, const uint64_t* keys, uint32_t* rows,
                                  const ShardGroups& misses) {
  ++version;
  for (uint32_t position : misses.positions) {
    rows[position] = DirectRow(keys[position]);
    Touch(ex, &keys[position], &rows[position], 1);
  }
  ex.ParallelFor(misses.total(), kRowGrain, [&](int64_t begin, int64_t end) {
    uint64_t new_keys[kBlock];
    uint32_t new_rows[kBlock];
    for (int64_t b = begin; b < end; b += kBlock) {
      const int64_t n = std::min(kBlock, end - b);
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t position = misses.positions[b + i];
        new_keys[i] = keys[position];
        new_rows[i] = rows[position];
      }
      WriteInitialRows(new_keys, new_rows, n);
    }
  });
  for (uint32_t position : misses.positions) {
    present_words()[rows[position] / 64] |= uint64_t{1} << (rows[position] % 64);
  }
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

void CpuTable::Impl::Clear(Executor& ex) {
  TouchAll(ex);
  ++version;
  for (Index& shard : shards) shard.Clear();
  arena->Clear();
  room = nullptr;
  std::vector<uint32_t>().swap(free_rows);
  remembered = Remembered();
  next_row = 0;
  if (options.use_hashtable) {
    size = 0;
  } else {
    std::memset(present.data(), 0, present.bytes());
  }
  ForgetSteps();  // no row owes anything any more
  initial_row_scale = 1.0;
  if (records != nullptr) records->Clear();
  step_number.ResumeFrom(-1);
}

}  // namespace sok
