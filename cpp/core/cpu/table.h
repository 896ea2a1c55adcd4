// CpuTable: one rank's shard of a table in host memory.
//
//     key -> hash -> index shard (1 of 64) -> bucket -> row number -> arena chunk -> row
//                                                                                    |
//                                              | embedding, dim | slot rows of the optimizer |
//
// Index and rows are apart: growth rehashes index shards one by one and never moves a row. Row
// numbers are dense over the table; erased ones are used again, last erased first. A new key's row
// is a pure function of (seed, table name, key, column), see initializer.h.
//
// A batch is looked up by ranges of keys, each range in blocks whose cache misses overlap. New keys
// are grouped by index shard and each shard is worked on by one thread: there are no locks on that
// path, and neither rows nor row numbers depend on how many threads took part.
//
// Whole calls lock the table themselves: readers share, writers exclude. Exceptions leave the table
// as it was, std::bad_alloc included.
//
// With use_hashtable=false there is no index: the row number is key / world_size, all max_capacity
// keys are present from the start, and a row is materialised when it is first inserted or assigned;
// until then it reads its initial row. A key of another rank or beyond the range throws
// std::out_of_range. Erase throws std::invalid_argument.
//
// With policies (policy.h) the table keeps a record a key (records.h). Then a training lookup goes
// through Observe, which decides which keys get a row and which make room for them; FindOrInsert
// does so by itself. Without policies there are no records and nothing of this costs anything.
//
// Cost: three cache misses to find a key (digests, key and row number, row), 0.01 us a key and
// thread with them overlapped; 15 to 30 bytes of index a key.
#ifndef SOK_CORE_CPU_TABLE_H_
#define SOK_CORE_CPU_TABLE_H_

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cpp/core/key_records.h"
#include "cpp/core/parallel.h"
#include "cpp/core/slots.h"
#include "cpp/core/table_options.h"

namespace sok {

// Rows may owe updates (dense Adam: the moments of an absent row decay at every step). Attached by
// the optimizer; the table asks it whenever a row is read or copied out.
class RowCatchUp {
 public:
  virtual ~RowCatchUp() = default;
  virtual bool pending() const = 0;  // false: rows may be read as they stand (fast path)
  // `row` points at [dim | slot rows...]. Brings it up to the current step. Must not throw: rows
  // are brought up while a batch is half written.
  virtual void Apply(float* row) const = 0;
  // Embedding as it would read now, without writing to `row`.
  virtual void Read(const float* row, float* embedding) const = 0;
  // All rows have been brought up to the current step: the history may be forgotten. A row whose
  // last_step is the initial one counts as brought up too. Called under the exclusive lock.
  virtual void Rebase() = 0;
  // What initial rows are multiplied by, in InitialRow and when a key is inserted: the weight decay
  // of steps that Rebase forgot. (Later steps count as missed ones, from last_step = 0 on.)
  virtual float InitialRowScale() const { return 1.0f; }
};

struct TableStats {
  int64_t size = 0;
  int64_t capacity = 0;      // keys that fit before the index grows
  int64_t max_capacity = 0;  // 0: unbounded
  int64_t num_buckets = 0;
  double load_factor = 0.0;        // size / slots allocated
  double mean_probe_length = 0.0;  // buckets visited to find a present key
  int64_t max_probe_length = 0;
  int64_t index_bytes = 0;
  int64_t arena_bytes = 0;  // allocated for rows and slot rows
  int64_t bytes = 0;        // everything the shard holds
};

// Keys, rows and slot rows of one instant. slot_rows holds the saved slots side by side.
struct TableSnapshot {
  std::vector<uint64_t> keys;    // [size]
  std::vector<float> rows;       // [size, dim]
  std::vector<float> slot_rows;  // [size, sum of saved slot widths]
  std::vector<std::string> slot_names;
  std::vector<int64_t> slot_widths;
  RecordSnapshot policy;
};

inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;

class CpuTable {
 public:
  explicit CpuTable(const TableOptions& options);
  ~CpuTable();
  CpuTable(const CpuTable&) = delete;
  CpuTable& operator=(const CpuTable&) = delete;

  const TableOptions& options() const;
  int64_t dim() const;

  // ---- whole calls: each takes the lock it needs. Keys may repeat. ----
  // Reads rows; a missing key reads its initial row and is not inserted.
  void Find(Executor& ex, const uint64_t* keys, int64_t num_keys,  // [num_keys]
            float* rows,                                           // [num_keys, dim]
            uint8_t* found) const;                                 // [num_keys] or null
  // Missing keys are inserted with their initial row. All or nothing: throws std::length_error
  // (naming table, max_capacity, size and the number of new keys) before anything changed.
  // inserted: [num_keys] or null; 1 at the first position of each new key.
  void FindOrInsert(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                    uint8_t* inserted);
  // Writes rows, inserting missing keys; of equal keys the last wins. Slot rows of present keys
  // stay.
  void Assign(Executor& ex, const uint64_t* keys, int64_t num_keys, const float* rows);
  int64_t Erase(Executor& ex, const uint64_t* keys, int64_t num_keys);  // returns keys removed
  void Clear();  // removes all keys, keeps options and slots; frees memory
  void Reserve(Executor& ex, int64_t num_keys);

  // Keys ascending by uint64 value, rows caught up. One instant. `evict`: calls Evict first, where
  // there is a policy for it.
  TableSnapshot Export(Executor& ex, bool with_slots, bool evict = false);
  // Inserts or overwrites keys with rows and slot rows; slots that the snapshot lacks get their
  // initial value; slots that this table has not (yet) are configured from the snapshot's names
  // and widths (initial 0) so that they survive until an optimizer attaches. `replace`: clears the
  // table first, once the snapshot has been checked.
  void Import(Executor& ex, const TableSnapshot& snapshot, bool replace = false);

  // ---- admission and eviction: whole calls, of a table that keeps records; std::invalid_argument
  // from one that keeps none ----
  bool keeps_records() const;
  bool filters() const;  // keys without a row read `no_permission`
  // A training lookup of all these keys, which may repeat: counts each once, inserts those that are
  // admitted, evicts by score where there is no room. The step advances by one. All or nothing:
  // throws std::length_error where the keys of the call alone are too many, or the table is full.
  void Observe(Executor& ex, const uint64_t* keys, int64_t num_keys);
  // Removes keys that have outlived their steps or fallen below the threshold; how many.
  int64_t Evict(Executor& ex);
  EvictedRows PopEvicted();
  PolicyStatistics Statistics() const;
  // All [num_keys]. A key never seen: 0 and -1.
  void KeyStatistics(const uint64_t* keys, int64_t num_keys, uint8_t* present, int64_t* frequencies,
                     int64_t* last_steps) const;
  // Missing keys are passed over; returns how many were there.
  int64_t AssignScores(const uint64_t* keys, int64_t num_keys, const int64_t* scores);
  void SetStep(int64_t step);  // the next training lookup is step + 1

  int64_t size() const;      // without the lock
  TableStats Stats() const;  // visits every key

  // ---- parts, for fused code in core/cpu: the caller holds the lock ----
  std::shared_mutex& mutex() const;
  // As Find; needs a shared lock. As FindOrInsert, of a table without policies; needs the exclusive
  // lock.
  void Read(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
            uint8_t* found) const;
  void ReadOrInsert(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows);
  // kNoRow where the key is missing. Needs a shared lock.
  void FindRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers) const;
  // Needs the exclusive lock. `num_inserted` may be null. All or nothing as FindOrInsert.
  void FindOrInsertRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                        int64_t* num_inserted);
  // Keeps the row numbers of keys that do not repeat for the update that follows a lookup. Needs
  // the exclusive lock. What the table forgets by lack of memory is only looked up again.
  void RememberRows(const uint64_t* keys, int64_t num_keys, const uint32_t* row_numbers) noexcept;
  // False unless these are the keys remembered last and none of them can have got another row
  // since. Needs a lock.
  bool RecallRows(const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers) const;
  // Observe, and row numbers of the keys, kNoRow for those that wait. Needs the exclusive lock.
  void ObserveRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers);
  // [dim | slot rows]; stays valid until the key is erased, slots are configured, or Clear.
  float* Row(uint32_t row_number) const;
  void Rows(const uint32_t* row_numbers, int64_t num_rows, const float** rows) const;
  void InitialRow(uint64_t key, float* row) const;  // [dim], catch-up included
  void MissingRow(uint64_t key, float* row) const;  // [dim], what a key without a row reads
  void CountDroppedGradients(int64_t num_keys);     // needs the exclusive lock

  // Slots. Configuring the same specs again is a no-op; other specs on a table that has slots
  // re-lay the rows, keeping slots of equal name and width. If a present slot moves or goes, rows
  // are caught up first and the catch-up is detached: it knows the old offsets. Needs the exclusive
  // lock.
  void ConfigureSlots(Executor& ex, const std::vector<SlotSpec>& specs);
  const std::vector<SlotSpec>& slots() const;
  int64_t SlotOffset(const std::string& name) const;  // floats from Row(); throws std::out_of_range
  // Whatever the optimizer keeps beside the rows; owned by the table.
  void AttachCatchUp(std::shared_ptr<RowCatchUp> catch_up);
  const std::shared_ptr<RowCatchUp>& catch_up() const;

 private:
  void ObserveAndRead(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                      uint8_t* inserted);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_TABLE_H_
