// Inside of CpuTable, shared by its source files: table.cc (lookup, erase), table_insert.cc (new
// keys), table_policy.cc (admission, records), table_evict.cc (eviction), table_state.cc (slots,
// import), table_reader.cc (export), table_changes.cc (deltas), table_aside.cc (replacing content),
// instant.cc (dumps beside training).
#ifndef SOK_CORE_CPU_TABLE_IMPL_H_
#define SOK_CORE_CPU_TABLE_IMPL_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cpp/core/cpu/arena.h"
#include "cpp/core/cpu/change_log.h"
#include "cpp/core/cpu/index.h"
#include "cpp/core/cpu/instant.h"
#include "cpp/core/cpu/records.h"
#include "cpp/core/cpu/row_format.h"
#include "cpp/core/cpu/row_ops.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/direct_rows.h"
#include "cpp/core/hash.h"
#include "cpp/core/initializer.h"

namespace sok {

using SharedLock = std::shared_lock<TableMutex>;
using ExclusiveLock = std::unique_lock<TableMutex>;

// Positions of a batch, grouped by the index shard of their key; within a shard in batch order.
// The grouping is a function of the keys alone, so any thread can work on a shard.
struct ShardGroups {
  std::vector<uint32_t> positions;
  int64_t offsets[kNumShards + 1] = {};

  int64_t total() const { return offsets[kNumShards]; }
  int64_t count(int shard) const { return offsets[shard + 1] - offsets[shard]; }
};

// Keys that are to lose their rows, chosen and not yet evicted. Puts them back if they never are.
struct Eviction {
  Eviction() = default;
  Eviction(const Eviction&) = delete;
  ~Eviction() {
    for (const EvictionQueue::Entry& entry : entries) {
      if (queue != nullptr) queue->Push(entry);
    }
  }
  int64_t size() const { return static_cast<int64_t>(entries.size()); }

  EvictionQueue* queue = nullptr;  // that they were taken from; null: from none
  std::vector<EvictionQueue::Entry> entries;
  std::list<EvictedRow> buffered;  // for the rows of the last entries
};

// New keys of a batch: made ready, then inserted. The pointers belong to the caller.
struct Insertion {
  Insertion(const uint64_t* batch_keys, int64_t n, uint32_t* row_numbers)
      : keys(batch_keys), num_keys(n), rows(row_numbers), kept_rows(rows), num_kept_rows(n) {}

  const uint64_t* keys;  // [num_keys]
  int64_t num_keys;
  uint32_t* rows;                // [num_keys] as FindRows left them
  bool keys_are_unique = false;  // skips the search for equal keys; must be right
  bool may_exceed = false;      // a write to a table that evicts by score: EvictSurplus must follow
  uint8_t* inserted = nullptr;  // [num_keys] or null: 1 at the first position of each new key
  // [num_keys, dim] or null: a new key gets the row at its last position, or its initial row.
  const float* given = nullptr;
  const uint32_t* kept_rows;  // [num_kept_rows], which must not be evicted; may be kNoRow
  int64_t num_kept_rows;

  // What PrepareInsert found: first positions of missing keys; if keys repeat, also the last
  // position of each, all positions, and for each of them which key of its shard it has.
  ShardGroups misses, repeats;
  std::vector<uint32_t> last;
  Scratch<int32_t> local_ids;
  Eviction eviction;
};

// Keys of a training lookup, classified and grouped by index shard.
struct LookupBatch {
  LookupBatch(const uint64_t* batch_keys, const int64_t* times, int64_t n)
      : keys(batch_keys), occurrences(times), rows(n) {}

  int64_t step = 0;
  const uint64_t* keys;  // [num_keys], as they came
  // [num_keys] How many occurrences each position stands for, if they count; null: one each.
  const int64_t* occurrences;
  Scratch<uint32_t> rows;  // [num_keys] kNoRow for keys that wait
  ShardGroups present, missing;
  // Missing keys, each once and ascending: first those that get a row, then those that wait. The
  // places of shard s begin at missing.offsets[s].
  std::vector<uint64_t> unique;
  std::vector<int64_t> counts;     // of the keys that get a row, this lookup included
  std::vector<int64_t> occurring;  // of `unique` in this lookup; 0 if occurrences do not count
  int64_t num_admitted[kNumShards] = {};
  int64_t num_refused[kNumShards] = {};
  // The admitted keys of all shards, in an order that is a function of the keys alone.
  std::vector<uint64_t> new_keys;
  std::vector<int64_t> new_counts, new_occurring;
  std::vector<uint32_t> new_rows;
  std::unique_ptr<Insertion> insertion;
  std::vector<uint32_t> withheld;  // row numbers, ascending, that this lookup must not read
};

struct CpuTable::Impl {
  Impl(const TableOptions& table_options, std::shared_ptr<BlockPool> shared_pool);

  // ---- reading ----
  // Both return whether all keys have a row.
  bool FindRange(const uint64_t* keys, int64_t num_keys, uint32_t* rows) const;
  bool FindRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* rows) const;
  // Finds keys and copies their rows out; missing keys read ReadMissingRows. Returns their number.
  int64_t ReadRange(const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                    float* rows) const;
  // ReadRange of a whole batch.
  int64_t ReadBatch(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                    float* rows) const;
  void CopyOut(uint32_t row_number, bool pending, float* out) const;
  // Calls fn(begin, end) on ranges that cover rows [0, num_rows), in turn; fn may use all threads.
  // If rows are on disk, each range has been brought to memory.
  template <typename Fn>
  void ForEachRange(Executor& ex, int64_t num_rows, RowUse use, const Fn& fn) const;
  // The same for listed rows.
  template <typename Fn>
  void ForEachPart(Executor& ex, const uint32_t* rows, int64_t num_rows, RowUse use,
                   const Fn& fn) const;
  // Initial rows, scaled by the weight decay of steps that the catch-up has forgotten.
  void InitialEmbeddings(const uint64_t* keys, int64_t num_keys, float* const* rows) const {
    InitialEmbeddings(keys, num_keys, initial_row_scale, rows);
  }
  void InitialEmbeddings(const uint64_t* keys, int64_t num_keys, double scale,
                         float* const* rows) const;
  void ReadInitialRows(const uint64_t* keys, int64_t num_keys, float* const* rows) const;
  // What keys without a row read: their initial row, or `no_permission` if the table filters keys.
  void ReadMissingRows(const uint64_t* keys, int64_t num_keys, float* const* rows) const;
  bool Pending() const { return catch_up != nullptr && catch_up->pending(); }

  // ---- changing ----
  // Inserts the missing keys: PrepareInsert, which may fail and changes nothing, then Insert.
  void InsertMissing(Executor& ex, Insertion* insertion);
  void PrepareInsert(Executor& ex, Insertion* insertion);
  void Insert(Executor& ex, Insertion* insertion);
  // InsertMissing with `row_numbers` and `rows` as ReadBatch left them: missing keys get the row
  // that they have read. If rows owe steps, they get their initial row instead, so that it is
  // rounded as if another call had inserted it.
  void InsertRead(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                  uint8_t* inserted, const float* rows);
  // FindRows, or kNoRow for all if nearly all keys are new: inserting finds the others, and the
  // index is probed once instead of twice. Returns whether all keys have a row.
  bool FindUnlessNew(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* rows) const;
  // The steps of both.
  struct NewNumbers;
  void DropRepeats(Executor& ex, Insertion* insertion) const;
  void CheckCapacity(int64_t num_new, int64_t num_evicted, bool may_exceed) const;
  void MakeRoom(Executor& ex, const ShardGroups& misses);
  int64_t InsertIntoIndex(Executor& ex, const uint64_t* keys, const NewNumbers& numbers,
                          uint32_t* rows, uint8_t* inserted);
  void WriteNewRows(const Insertion& insertion, const NewNumbers& numbers, int64_t begin,
                    int64_t end);
  void TakeBack(const NewNumbers& numbers, const uint32_t* rows, int64_t num_inserted);
  void ReserveDirect(Executor& ex, const uint64_t* keys, const ShardGroups& misses);
  void InsertDirect(Executor& ex, const uint64_t* keys, uint32_t* rows, const ShardGroups& misses);
  void ReserveIndex(Executor& ex, int64_t num_keys);
  void WriteInitialRows(const uint64_t* keys, const uint32_t* rows, int64_t num_keys);
  void WriteGivenRow(const float* given, bool is_new, uint32_t row_number);
  void Clear(Executor& ex);

  // ---- admission and eviction; all but Records need `records` ----
  TableRecords& Records() const;  // throws std::invalid_argument if there are none
  // A training lookup of keys, which may repeat: made ready, which may fail and counts nothing, then
  // made.
  void PrepareLookup(Executor& ex, int64_t num_keys, LookupBatch* batch);
  void MakeLookup(Executor& ex, int64_t num_keys, LookupBatch* batch);
  void ClassifyMissing(Executor& ex, LookupBatch* batch);
  // Lists the unique missing keys of a shard, ascending; returns how many.
  int64_t ListMissing(int64_t shard, LookupBatch* batch) const;
  void CountLookup(Executor& ex, LookupBatch* batch);
  int64_t Evict(Executor& ex);
  // Chooses keys of least score, so that `num_new` keys have room without them.
  void ChooseEvicted(Executor& ex, int64_t num_new, const Insertion& insertion, Eviction* eviction);
  void PrepareEviction(Executor& ex, Eviction* eviction);
  void EvictRows(Eviction* eviction) noexcept;
  template <typename IsKept>
  void TakeLowest(Executor& ex, int64_t count, IsKept is_kept, Eviction* eviction);
  // Evicts what a write has brought beyond max_capacity; returns the number of keys.
  int64_t EvictSurplus(Executor& ex);
  // Records keys that were inserted because they are written, not looked up.
  void RecordWritten(const Insertion& insertion);

  // ---- state ----
  void ImportRecords(const TableSnapshot& snapshot, const uint32_t* rows);
  void CatchUpAll(Executor& ex);
  void ForgetSteps();  // no row owes anything; the steps' weight decay goes to initial_row_scale
  double InitialRowScale() const;
  SlotsAreOf SlotsOwner() const {
    return catch_up != nullptr ? SlotsAreOf::kRule
           : is_aside          ? SlotsAreOf::kExpectedRule
                               : SlotsAreOf::kContent;
  }
  void CatchUpInOrder(Executor& ex);
  // Copies rows and slot rows of keys, whose row numbers may be kNoRow. Either may be null.
  void CopyRows(Executor& ex, const uint64_t* keys, const uint32_t* row_numbers, int64_t num_keys,
                float* rows, float* slot_rows) const;
  // The same of rows in memory, at `from` [num_keys]; null where a key has none.
  void CopyRange(const uint64_t* keys, const float* const* from, int64_t num_keys,
                 const RowLayout& layout, float* rows, float* slot_rows) const;
  RowLayout Layout() const { return {slots, slot_initial, initial_row_scale}; }
  void CopyRecords(const uint32_t* row_numbers, int64_t num_keys, int64_t* records) const;
  // Begins the next interval of changes, at the instant of `changes`, of which it fills all but the
  // snapshot and `erased`. Returns the changes since, for ListChanges.
  ChangeLog::Interval BeginChanges(Executor& ex, int64_t since, TableChanges* changes);
  // Adds the keys that are erased now to `erased`, and leaves those that are present in
  // interval->touched.
  void ListChanges(Executor& ex, ChangeLog::Interval* interval,
                   std::vector<uint64_t>* erased) const;
  // ---- before anything changes: each change is announced by one of these three ----
  // Rows of these keys, or their records, change.
  void Touch(Executor& ex, const uint64_t* keys, const uint32_t* rows, int64_t num_keys) noexcept {
    if (instant != nullptr) instant->Save(ex, keys, rows, num_keys);
    if (changes != nullptr) changes->Touch(keys, rows, num_keys);
  }
  // A key loses its row.
  void Leave(uint64_t key, uint32_t row) noexcept {
    InlineExecutor alone;
    if (instant != nullptr) instant->Save(alone, &key, &row, 1);
    if (changes != nullptr) changes->Erase(key, row);
  }
  // Any row may change, or where it is.
  void TouchAll(Executor& ex, bool logs = true) noexcept {
    if (instant != nullptr) {
      instant->SaveRest(ex);
      if (records != nullptr && records->filter != nullptr) records->filter->ReadRestOfInstant();
    }
    if (changes != nullptr && logs) changes->TouchAll();
  }
  void SwapContent(Impl& other) noexcept;  // all but slots and optimizer; needs both locks

  // ---- without hashtable ----
  uint32_t DirectRow(uint64_t key) const {  // throws std::out_of_range
    if (!direct.Has(key)) RefuseDirectKey(options, key);
    return direct.RowOf(key);
  }
  bool IsPresent(uint32_t row) const { return (present_words()[row / 64] >> (row % 64)) & 1; }
  uint64_t* present_words() const { return static_cast<uint64_t*>(present.data()); }

  // The embedding of a row, `values` [dim].
  void ReadRow(const float* row, float* values) const;
  void WriteRow(const float* values, float* row) const;
  // Throws std::invalid_argument if rows [num_keys, dim] hold values that would become infinite.
  void RequireRowsFit(const uint64_t* keys, const float* rows, int64_t num_keys) const;

  int64_t slot_floats() const { return static_cast<int64_t>(slot_initial.size()); }

  const TableOptions options;
  const Initializer initializer;  // points into options.initializer
  const RowFormat format;
  const DirectRows direct;
  mutable TableMutex mutex;

  std::shared_ptr<BlockPool> pool;  // before the shards and rows that use it
  Index shards[kNumShards];
  std::unique_ptr<Arena> arena;
  std::vector<uint32_t> free_rows;  // last in, first out
  int64_t next_row = 0;             // row numbers below have been given out at some time
  Memory present;                   // without hashtable: one bit per row, set once it is written
  std::atomic<int64_t> size{0};     // atomic so that size() needs no lock
  // Changes whenever a key may have got another row number, or a missing key another initial row.
  uint64_t version = 0;

  // What RememberRows was given, and at which version.
  struct Remembered {
    int64_t num_keys = 0;
    Scratch<uint64_t> keys;
    Scratch<uint32_t> rows;
    uint64_t version = 0;
  };
  Remembered remembered;

  std::vector<SlotVariableSpec> slots;
  std::vector<SlotVariableSpec> imported_slots;  // those of the last imported content
  std::vector<float> slot_initial;               // what follows the embedding in a new row
  std::shared_ptr<RowCatchUp> catch_up;
  double initial_row_scale = 1.0;  // weight decay of steps that no catch_up remembers
  StepNumber step_number;
  bool is_aside = false;                  // see MakeAside
  std::unique_ptr<TableRecords> records;  // null without policies
  std::unique_ptr<ChangeLog> changes;     // null until a delta may follow
  Instant* instant = nullptr;             // of a dump beside training, or null
  std::unique_ptr<Instant::Room> room;    // of earlier ones, or null
};

template <typename Fn>
void CpuTable::Impl::ForEachRange(Executor& ex, int64_t num_rows, RowUse use, const Fn& fn) const {
  const int64_t step = arena->is_on_disk() ? arena->chunk_rows() : num_rows;
  for (int64_t begin = 0; begin < num_rows; begin += step) {
    const int64_t end = std::min(num_rows, begin + step);
    arena->BringRange(ex, begin, end - begin, use);
    fn(begin, end);
  }
}

template <typename Fn>
void CpuTable::Impl::ForEachPart(Executor& ex, const uint32_t* rows, int64_t num_rows, RowUse use,
                                 const Fn& fn) const {
  const int64_t step = arena->is_on_disk() ? arena->part_rows() : num_rows;
  for (int64_t begin = 0; begin < num_rows; begin += step) {
    const int64_t end = std::min(num_rows, begin + step);
    arena->Bring(ex, rows + begin, end - begin, use);
    fn(begin, end);
  }
}

// Sizes that are known to the compiler become a few vector moves instead of a call.
inline void CopyFloats(const float* from, int64_t n, float* to) {
  switch (n) {
    case 8:
      std::memcpy(to, from, 8 * sizeof(float));
      return;
    case 16:
      std::memcpy(to, from, 16 * sizeof(float));
      return;
    case 32:
      std::memcpy(to, from, 32 * sizeof(float));
      return;
    default:
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
  }
}

inline void CpuTable::Impl::ReadRow(const float* row, float* values) const {
  if (format.is_narrow()) return format.Read(row, values);
  CopyFloats(row, options.dim, values);
}

inline void CpuTable::Impl::WriteRow(const float* values, float* row) const {
  if (format.is_narrow()) return format.Write(values, row);
  CopyFloats(values, options.dim, row);
}

// Positions per part of a batch; parts depend on the batch alone.
inline constexpr int64_t kPartKeys = 4096;

// Shards to hand to a thread at a time, so that it gets about a thousand keys.
inline int64_t ShardGrain(int64_t num_keys) {
  const int64_t grain = num_keys > 0 ? 1024 * kNumShards / num_keys : kNumShards;
  return grain < 1 ? 1 : (grain > kNumShards ? kNumShards : grain);
}

// Groups the positions for which select(position) holds.
template <typename Select>
void GroupByShard(Executor& ex, const uint64_t* keys, int64_t num_keys, Select select,
                  ShardGroups* groups) {
  const int64_t num_parts = (num_keys + kPartKeys - 1) / kPartKeys;
  std::vector<uint32_t> counts(static_cast<size_t>(num_parts) * kNumShards);
  ex.ParallelFor(num_parts, 2, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      uint32_t* const count = &counts[part * kNumShards];
      const int64_t last = std::min(num_keys, (part + 1) * kPartKeys);
      for (int64_t i = part * kPartKeys; i < last; ++i) {
        if (select(i)) ++count[HashShard(HashKey(keys[i]))];
      }
    }
  });
  // Counts become places: shard by shard, and part by part within a shard.
  int64_t place = 0;
  for (int shard = 0; shard < kNumShards; ++shard) {
    groups->offsets[shard] = place;
    for (int64_t part = 0; part < num_parts; ++part) {
      const uint32_t count = counts[part * kNumShards + shard];
      counts[part * kNumShards + shard] = static_cast<uint32_t>(place);
      place += count;
    }
  }
  groups->offsets[kNumShards] = place;
  groups->positions.resize(static_cast<size_t>(place));
  if (place == 0) return;
  ex.ParallelFor(num_parts, 2, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      uint32_t* const next = &counts[part * kNumShards];
      const int64_t last = std::min(num_keys, (part + 1) * kPartKeys);
      for (int64_t i = part * kPartKeys; i < last; ++i) {
        if (select(i)) {
          groups->positions[next[HashShard(HashKey(keys[i]))]++] = static_cast<uint32_t>(i);
        }
      }
    }
  });
}

}  // namespace sok

#endif  // SOK_CORE_CPU_TABLE_IMPL_H_
