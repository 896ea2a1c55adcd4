// Table: one rank's shard of a table, in host or device memory.
//
//     Table <- CpuTable   cpu/table.h    host memory, on the caller's threads
//           <- CudaTable  cuda/table.h   device memory, on a stream of the device
//
// The calls that both share, each for a whole batch. Lookup, combine and update of rows are fused
// code for one kind of memory and work on CpuTable or CudaTable directly.
//
// Pointers are to the kind of memory the table is in; vectors and snapshots are in host memory. A
// call locks the table itself. If it throws, even std::bad_alloc, the table is as it was. Keys may
// repeat.
#ifndef SOK_CORE_TABLE_H_
#define SOK_CORE_TABLE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/hash.h"
#include "cpp/core/key_records.h"
#include "cpp/core/parallel.h"
#include "cpp/core/slots.h"
#include "cpp/core/table_options.h"

struct CUstream_st;  // cudaStream_t points to one

namespace sok {

// What a call runs on: threads of the host, or a stream of the device.
class CallContext {
 public:
  CallContext(Executor& threads) : threads_(&threads) {}  // NOLINT: meant to convert
  CallContext(CUstream_st* stream) : stream_(stream) {}   // NOLINT: null is the default stream
  Executor& threads() const;    // throws std::logic_error if it is a stream
  CUstream_st* stream() const;  // throws std::logic_error if it is threads

 private:
  Executor* threads_ = nullptr;
  CUstream_st* stream_ = nullptr;
};

struct MemoryStats {
  int64_t size = 0;
  int64_t capacity = 0;      // keys that fit before the index grows
  int64_t max_capacity = 0;  // 0: unbounded
  int64_t num_buckets = 0;
  double load_factor = 0.0;        // slots in use (on a device erased ones too) / slots allocated
  double mean_probe_length = 0.0;  // buckets visited to find a present key
  int64_t max_probe_length = 0;
  int64_t index_bytes = 0;
  int64_t arena_bytes = 0;  // allocated for rows and slot rows; of rows on disk, those in memory
  int64_t bytes = 0;        // everything the shard holds in memory
  StorageStats storage;

  // Calls f(name, field) for every field, including those of `storage`.
  template <typename F>
  void ForEachField(F&& f) const {
    f("size", size);
    f("capacity", capacity);
    f("max_capacity", max_capacity);
    f("num_buckets", num_buckets);
    f("load_factor", load_factor);
    f("mean_probe_length", mean_probe_length);
    f("max_probe_length", max_probe_length);
    f("index_bytes", index_bytes);
    f("arena_bytes", arena_bytes);
    f("bytes", bytes);
    f("resident_bytes", storage.resident_bytes);
    f("file_bytes", storage.file_bytes);
    f("bytes_read", storage.bytes_read);
    f("bytes_written", storage.bytes_written);
    f("blocks_evicted", storage.blocks_evicted);
  }
};

// A table's content at one instant.
struct TableSnapshot : KeyedRows {
  RecordSnapshot policy;
  int64_t optimizer_step = -1;      // last step contained in the slot rows; -1: not known
  double initial_row_scale = -1.0;  // as Table::InitialRowScale; -1: not known
};

// Consecutive steps of an optimizer that also moves rows outside the batch (adam_replay.h).
struct StepRun {
  int64_t count = 0;  // 0: at this point every row was brought up to date and owes nothing
  double learning_rate = 0.0;
  int64_t step = 0;  // the table's own number of the first of these steps
};

// What changed in a table between two dumps.
struct TableChanges {
  TableSnapshot snapshot;        // the keys touched; if `whole`, all keys
  std::vector<uint64_t> erased;  // ascending; keys that no longer have a row
  bool whole = false;            // the snapshot replaces the table's earlier content
  // The steps that move untouched rows and the optimizer that made them (OptimizerOptions::ToString
  // with 9 digits); empty if the optimizer changes only the rows of the batch.
  std::vector<StepRun> steps;
  std::string optimizer;
  int64_t number = 0;  // of this instant, for Table::OpenChanges
};

// Reads a table's content at one instant in parts, for a dump. While the reader exists, calls that
// change the table wait; for a table in device memory all calls wait.
//
// A reader `beside` writers lets them go on, and reads each key with the row of its instant all the
// same; each row once, in the order of ReadKeys.
class TableReader {
 public:
  virtual ~TableReader() = default;

  // Everything but per-key data: `snapshot` has no keys, rows, slot rows or records, and beside
  // writers no waiting keys before ReadWaiting.
  virtual const TableChanges& about() const = 0;
  virtual void ReadWaiting() {}
  virtual int64_t num_keys() const = 0;
  // The next `num_keys` keys; they ascend by uint64 value.
  virtual void ReadKeys(CallContext context, int64_t num_keys, uint64_t* keys) = 0;
  // `keys` are keys of ReadKeys in its order, beginning with number `first`. Reads their rows
  // [num_keys, dim], slot_rows [num_keys, slot width], records [num_keys, 3]. Null: not wanted.
  virtual void ReadRows(CallContext context, int64_t first, const uint64_t* keys, int64_t num_keys,
                        float* rows, float* slot_rows, int64_t* records) const = 0;
  // A reader beside writers reads as fast as it can from now on. Of any thread.
  virtual void Hurry() {}
};

class Table {
 public:
  virtual ~Table() = default;

  virtual const TableOptions& options() const = 0;
  int64_t dim() const { return options().dim; }
  bool keeps_records() const { return options().policy.keeps_records(); }
  // Whether keys without a row read `no_permission`.
  bool filters() const { return options().policy.filters(); }
  // Reads rows. A missing key is not inserted; it reads its initial row, or `no_permission` if the
  // table filters keys.
  virtual void Find(CallContext context, const uint64_t* keys, int64_t num_keys,  // [num_keys]
                    float* rows,                                                  // [num_keys, dim]
                    uint8_t* found) const = 0;  // [num_keys] or null
  // The factor by which weight decay has scaled an initial row so far; 1 without.
  virtual double InitialRowScale(CallContext context) const = 0;
  // Writes zeros to `rows` [num_rows, dim], in place of rows that could not be read.
  virtual void WriteZeros(CallContext context, float* rows, int64_t num_rows) const = 0;
  // Missing keys are inserted with their initial row. All or nothing: throws std::length_error
  // (naming table, max_capacity, size and the number of new keys) before anything has changed.
  // inserted: [num_keys] or null; 1 at one position of each new key, on the host the first.
  virtual void FindOrInsert(CallContext context, const uint64_t* keys, int64_t num_keys,
                            float* rows, uint8_t* inserted) = 0;
  // Writes rows and inserts missing keys; of equal keys the last wins. Slot rows of present keys
  // are kept. A table that evicts by score takes any number of keys, see TakeSurplus; another throws
  // std::length_error if it cannot hold them.
  virtual void Assign(CallContext context, const uint64_t* keys, int64_t num_keys,
                      const float* rows) = 0;
  // Also forgets keys that wait in an exact filter, and evicted rows in the buffer. Returns how many
  // keys had a row or waited.
  virtual int64_t Erase(CallContext context, const uint64_t* keys, int64_t num_keys) = 0;
  // Removes all keys, keeps options and slots; frees memory.
  virtual void Clear(CallContext context) = 0;
  virtual void Reserve(CallContext context, int64_t num_keys) = 0;  // room for so many in total
  virtual int64_t Size(CallContext context) const = 0;
  virtual MemoryStats Stats(CallContext context) const = 0;  // visits every key

  // Keys ascending by uint64 value, rows up to date. `evict`: calls Evict first if the policy has
  // steps_to_live or an l2_threshold.
  TableSnapshot Export(CallContext context, bool with_slots, bool evict = false);
  // Export in parts, without a copy of the table. The table must outlive the reader.
  virtual std::unique_ptr<TableReader> OpenContent(CallContext context, bool with_slots,
                                                   bool evict = false) = 0;
  // Reads what changed since the instant `since` (TableChanges::number), with slots: a delta to the
  // dump of that instant. Evicts first as Export does. 0: everything; the first such call makes the
  // table begin to log changes. Throws std::invalid_argument if the log no longer reaches back to
  // `since`, and for tables in device memory.
  // `beside`: calls that change the table do not wait for the reader. `since` must be 0 then, and
  // the table must have no other such reader.
  virtual std::unique_ptr<TableReader> OpenChanges(CallContext context, int64_t since,
                                                   bool beside = false);
  // Begins a log of changes; the content now equals a dump's. This instant's number; 0: no log.
  virtual int64_t KeepChanges(CallContext context);
  // Inserts or overwrites keys with rows and slot rows; of equal keys the last wins. Slots that the
  // snapshot lacks get their initial value. Slots that the table does not have yet are configured
  // by the snapshot's names and widths, and are kept until an optimizer attaches. NaN in a slot row
  // means not known: the slot's initial value replaces it. Keys beyond max_capacity are as in Assign.
  // `replace`: the snapshot becomes the table's whole content; it is built aside first, so a failure
  // leaves the table as it was.
  virtual void Import(CallContext context, const TableSnapshot& snapshot, bool replace = false) = 0;
  // An empty table with the same options and slots, for content that will replace this one's.
  virtual std::unique_ptr<Table> MakeAside(CallContext context) const = 0;
  // Replaces the content by that of a table that MakeAside made, which must not be used again.
  // Throws only if slots were configured meanwhile and memory runs out; then nothing has changed.
  virtual void TakeContent(CallContext context, Table& aside) = 0;

  // Lays rows out for these slots. Configuring the same ones again is a no-op; slots of equal name
  // and width are kept, others get their initial value. An initial value may be NaN, not known yet:
  // slot rows that hold NaN get the initial value once it is configured.
  virtual void ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) = 0;
  virtual std::vector<SlotVariableSpec> Slots() const = 0;

  // ---- admission and eviction. A table without records throws std::invalid_argument. ----
  // Records a training lookup of these keys: counts them (policy.h), inserts those that are
  // admitted and evicts by score if there is no room. The step advances by one. All or nothing:
  // throws std::length_error if the keys of this call alone are too many or the table is full.
  virtual void RecordTrainingLookup(CallContext context, const uint64_t* keys,
                                    int64_t num_keys) = 0;
  // Removes keys beyond steps_to_live or below l2_threshold; returns their number.
  virtual int64_t Evict(CallContext context) = 0;
  virtual EvictedRows PopEvicted() = 0;
  // The surplus of writes since the last call. If the keys of an Assign or Import alone are more than
  // max_capacity, a table with a score first evicts all other keys, then those of least score among
  // the written ones. A table aside chooses among all keys, whichever part they came with.
  int64_t TakeSurplus() { return surplus_.exchange(0); }
  virtual PolicyCounts Statistics(CallContext context) const = 0;
  // All [num_keys]. A key never seen has frequency 0 and last step -1.
  virtual void KeyStatistics(CallContext context, const uint64_t* keys, int64_t num_keys,
                             uint8_t* present, int64_t* frequencies, int64_t* last_steps) const = 0;
  // Skips missing keys; returns the number of present keys. Of equal keys the last wins.
  virtual int64_t AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                               const int64_t* scores) = 0;
  virtual void SetStep(int64_t step) = 0;  // the next training lookup is step + 1

 protected:
  std::atomic<int64_t> surplus_{0};
};

// ---- checks that host and device tables share; they throw std::invalid_argument ----
void RequireHashtable(const TableOptions& options);  // for Erase
// All parts of a snapshot must fit its number of keys and the table's dim.
void CheckSnapshot(const TableSnapshot& snapshot, const TableOptions& options);
// Where a table's slots are from: imported; of the optimizer attached; or of that of the table beside
// which this one was made, whose state may be in the content to come.
enum class SlotsAreOf { kContent, kRule, kExpectedRule };
// The slots for an import: the table's, then those of the snapshot that it lacks. The latter have the
// initial value NaN, not known, until an optimizer sets it. Content of another rule has its own slots
// only, in place of those expected. Throws if it is added to that of an optimizer, or widths differ.
std::vector<SlotVariableSpec> SlotsWithThoseOf(const TableSnapshot& snapshot,
                                               const std::vector<SlotVariableSpec>& slots,
                                               SlotsAreOf owner, const TableOptions& options);
// Writes names and widths of the saved slots to the snapshot.
void NameSavedSlots(const std::vector<SlotVariableSpec>& slots, TableSnapshot* snapshot);

}  // namespace sok

#endif  // SOK_CORE_TABLE_H_
