// CpuTable: one rank's shard of a table in host memory.
//
//     key -> hash -> index shard (1 of 64) -> bucket -> row number -> arena chunk -> row
//                                                                                    |
//                                              | embedding, dim | slot rows of the optimizer |
//
// Index and rows are separate: growth rehashes index shards one by one and never moves a row. Row
// numbers are dense over the table; erased ones are used again, last erased first. A new key's row
// is a pure function of (seed, table name, key, column), see initializer.h.
//
// Threads look up ranges of a batch, each in blocks whose cache misses overlap. New keys are
// grouped by index shard, and one thread works on each shard: that path has no locks, and neither
// rows nor row numbers depend on the number of threads.
//
// Whole calls lock the table themselves: readers share, writers exclude.
//
// With use_hashtable=false there is no index: the row number is key / world_size, all max_capacity
// keys are present from the start, and a row is materialised when it is first inserted or assigned;
// until then it reads its initial row. A key of another rank or beyond the range throws
// std::out_of_range. Erase throws std::invalid_argument.
//
// With policies (policy.h) the table keeps one record per key (records.h). A training lookup then
// goes through a TrainingLookup, which decides which keys get a row and which make room for
// them; FindOrInsert calls it by itself. A table without policies keeps no records.
//
// Cost: three cache misses to find a key (digests, key and row number, row), 0.01 us per key
// and thread with them overlapped; 15 to 30 bytes of index per key.
#ifndef SOK_CORE_CPU_TABLE_H_
#define SOK_CORE_CPU_TABLE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_mutex.h"
#include "cpp/core/step_number.h"
#include "cpp/core/table.h"

namespace sok {

class ChangeLog;
class RowFormat;

// Rows may owe updates (dense Adam: at every step the moments of all rows decay). Attached by the
// optimizer; the table asks it whenever a row is read or copied out.
class RowCatchUp {
 public:
  virtual ~RowCatchUp() = default;
  virtual std::string ToString() const = 0;  // of the optimizer's options, to all digits
  virtual bool pending() const = 0;          // false: all rows are up to date (fast path)
  // Brings `row`, [dim | slot rows...], up to the current step; only float32 rows may owe anything.
  // Must not throw: rows are brought up while a batch is half written.
  virtual void Apply(float* row) const = 0;
  // The up-to-date embedding, without writing to `row`.
  virtual void Read(const float* row, float* embedding) const = 0;
  // All rows have been brought up to the current step: the history may be forgotten. A row whose
  // last_step is the initial one counts as brought up too. Called under the exclusive lock.
  virtual void Rebase() = 0;
  virtual int64_t bytes() const { return 0; }  // that it holds besides the rows
  // The factor by which weight decay since the last Rebase scales an initial row. A new row owes
  // these steps (last_step = 0); the table keeps the factor of the steps before.
  virtual double Decay() const { return 1.0; }
};

class CpuTable final : public Table {
 public:
  // Takes the memory that `sharing` frees, and the other way round, if that is not null.
  explicit CpuTable(const TableOptions& options, const CpuTable* sharing = nullptr);
  ~CpuTable() override;
  CpuTable(const CpuTable&) = delete;
  CpuTable& operator=(const CpuTable&) = delete;

  // ---- whole calls (table.h): each takes the lock it needs ----
  const TableOptions& options() const override;
  void Find(CallContext context, const uint64_t* keys, int64_t num_keys, float* rows,
            uint8_t* found) const override;
  double InitialRowScale(CallContext context) const override;
  void WriteZeros(CallContext context, float* rows, int64_t num_rows) const override;
  void FindOrInsert(CallContext context, const uint64_t* keys, int64_t num_keys, float* rows,
                    uint8_t* inserted) override;
  void Assign(CallContext context, const uint64_t* keys, int64_t num_keys,
              const float* rows) override;
  int64_t Erase(CallContext context, const uint64_t* keys, int64_t num_keys) override;
  void Clear(CallContext context) override;
  void Reserve(CallContext context, int64_t num_keys) override;
  int64_t Size(CallContext context) const override;  // without the lock
  MemoryStats Stats(CallContext context) const override;
  std::unique_ptr<TableReader> OpenContent(CallContext context, bool with_slots,
                                           bool evict = false) override;
  std::unique_ptr<TableReader> OpenChanges(CallContext context, int64_t since,
                                           bool beside = false) override;
  int64_t KeepChanges(CallContext context) override;
  void Import(CallContext context, const TableSnapshot& snapshot, bool replace = false) override;
  std::unique_ptr<Table> MakeAside(CallContext context) const override;
  void TakeContent(CallContext context, Table& aside) override;
  void ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) override;
  std::vector<SlotVariableSpec> Slots() const override;
  void RecordTrainingLookup(CallContext context, const uint64_t* keys, int64_t num_keys) override;
  int64_t Evict(CallContext context) override;
  EvictedRows PopEvicted() override;
  PolicyCounts Statistics(CallContext context) const override;
  void KeyStatistics(CallContext context, const uint64_t* keys, int64_t num_keys, uint8_t* present,
                     int64_t* frequencies, int64_t* last_steps) const override;
  int64_t AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                       const int64_t* scores) override;
  void SetStep(int64_t step) override;

  int64_t size() const;  // without the lock

  // ---- parts, for fused code in core/cpu: the caller holds the lock ----
  TableMutex& mutex() const;
  // Find, with a shared lock.
  void Read(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
            uint8_t* found) const;
  // Fetch rows that are about to be used from disk, all in one go; do nothing if rows are in
  // memory. Skip kNoRow and missing keys. Need a shared lock.
  void BringRows(Executor& ex, const uint32_t* row_numbers, int64_t num_rows, bool writes) const;
  void BringKeys(Executor& ex, const uint64_t* keys, int64_t num_keys, bool writes) const;
  // kNoRow for missing keys. Needs a shared lock.
  void FindRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers) const;
  // Needs the exclusive lock. All or nothing as FindOrInsert. `keys_are_unique` must be right.
  void FindOrInsertRows(Executor& ex, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                        bool keys_are_unique = false);
  // Keeps the row numbers of unique keys for the update that follows a lookup. Needs the exclusive
  // lock. If memory is short it keeps none, and they are looked up again.
  void RememberRows(Executor& ex, const uint64_t* keys, int64_t num_keys,
                    Scratch<uint32_t> row_numbers) noexcept;
  // The row numbers, once; none unless these are the keys remembered last and none of them can have
  // got another row since. Needs the exclusive lock.
  Scratch<uint32_t> RecallRows(Executor& ex, const uint64_t* keys, int64_t num_keys);
  bool counts_occurrences() const { return options().policy.count_occurrences && keeps_records(); }
  const RowFormat& format() const;
  // Laid out as `format` says; valid until the key is erased, slots are configured, or Clear.
  float* Row(uint32_t row_number) const;
  void Rows(const uint32_t* row_numbers, int64_t num_rows, const float** rows) const;
  void ReadRow(uint32_t row_number, float* row) const;  // [dim], catch-up included
  void InitialRow(uint64_t key, float* row) const;      // [dim], catch-up included
  void MissingRow(uint64_t key, float* row) const;      // [dim], what a key without a row reads
  void CountDroppedGradients(int64_t num_keys);         // needs the exclusive lock

  // ConfigureSlots for a caller that holds the exclusive lock. If a present slot moves or goes,
  // rows are brought up to date first and the catch-up is detached: it knows the old offsets. With
  // `keeps` false all slots get their initial values.
  void LayOutSlots(Executor& ex, const std::vector<SlotVariableSpec>& specs, bool keeps = true);
  StepNumber& step_number() const;  // of the optimizer; needs the exclusive lock
  const std::vector<SlotVariableSpec>& slots() const;
  int64_t SlotOffset(const std::string& name) const;  // floats from Row(); throws std::out_of_range
  // Brings all rows up to date and forgets the history. Needs the exclusive lock.
  void CatchUpRows(Executor& ex);
  int64_t row_bytes() const;  // of the rows given out so far
  // What the optimizer keeps besides the rows; owned by the table.
  void AttachCatchUp(std::shared_ptr<RowCatchUp> catch_up);
  const std::shared_ptr<RowCatchUp>& catch_up() const;
  ChangeLog* changes() const;  // null until a delta may follow; needs the exclusive lock
  // Called before rows of these keys, or what is recorded of them, change: logs the keys, and lets a
  // dump beside training copy the rows. Row numbers may be kNoRow. Needs the exclusive lock.
  void Touch(Executor& ex, const uint64_t* keys, const uint32_t* row_numbers,
             int64_t num_keys) noexcept;

 private:
  friend class TrainingLookup;
  void RecordAndRead(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                     uint8_t* inserted);

  struct Impl;
  class Instant;
  class Reader;
  std::unique_ptr<Impl> impl_;
};

// RecordTrainingLookup in two parts, so that several tables can be made ready before the first of
// them changes. Needs the table's exclusive lock while it lives.
class TrainingLookup {
 public:
  // May fail, and has changed nothing. Each key stands for `occurrences` [num_keys] of it (null:
  // one); they matter if the table counts occurrences. Both must outlive this object.
  TrainingLookup(Executor& ex, CpuTable& table, const uint64_t* keys, const int64_t* occurrences,
                 int64_t num_keys);
  ~TrainingLookup();
  TrainingLookup(const TrainingLookup&) = delete;
  TrainingLookup& operator=(const TrainingLookup&) = delete;

  // Evicts, inserts and counts. Cannot fail.
  void Make(Executor& ex);
  uint32_t* rows() const;  // [num_keys] row numbers; kNoRow for keys without a row
  // Row numbers, ascending, of new rows that this lookup must not read: their keys read MissingRow.
  const std::vector<uint32_t>& withheld() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_TABLE_H_
