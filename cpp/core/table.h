// Table: one rank's shard of a table, whichever memory it is in.
//
//     Table <- CpuTable   cpu/table.h    host memory, on the caller's threads
//           <- CudaTable  cuda/table.h   device memory, on a stream of the device
//
// The calls that both have. Each is a whole batch; what handles single rows (lookup, combine,
// update) is fused per memory and works on the two classes themselves.
//
// Pointers are to the table's own memory; vectors and snapshots are in host memory. A call locks
// the table itself. Exceptions leave the table as it was, std::bad_alloc included. Keys may repeat.
#ifndef SOK_CORE_TABLE_H_
#define SOK_CORE_TABLE_H_

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
  int64_t arena_bytes = 0;  // allocated for rows and slot rows; of those on disk: in memory
  int64_t bytes = 0;        // everything the shard holds in memory
  StorageStats storage;

  // Calls f(name, field) for every field, those of `storage` among them.
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

// A table's content of one instant.
struct TableSnapshot : KeyedRows {
  RecordSnapshot policy;
  int64_t optimizer_step = -1;      // that the slot rows have behind them; -1: not known
  double initial_row_scale = -1.0;  // as Table::InitialRowScale; -1: not known
};

struct TableChanges;

// The content of one instant, in parts: what a dump is written from. While it exists, calls that
// change the table wait; of a table in device memory all calls do.
class TableReader {
 public:
  virtual ~TableReader() = default;

  // All but what goes by key: `snapshot` without keys, rows, slot rows and records.
  virtual const TableChanges& about() const = 0;
  virtual int64_t num_keys() const = 0;
  // The next `num_keys` keys; they ascend by uint64 value.
  virtual void ReadKeys(CallContext context, int64_t num_keys, uint64_t* keys) = 0;
  // Of keys that ReadKeys gave, in that order, from the one at `first` on: rows [num_keys, dim],
  // slot_rows [num_keys, slot width], records [num_keys, 3]. Null: not wanted.
  virtual void ReadRows(CallContext context, int64_t first, const uint64_t* keys, int64_t num_keys,
                        float* rows, float* slot_rows, int64_t* records) const = 0;
};

class Table {
 public:
  virtual ~Table() = default;

  virtual const TableOptions& options() const = 0;
  int64_t dim() const { return options().dim; }
  bool keeps_records() const { return options().policy.keeps_records(); }
  // Keys without a row read `no_permission`.
  bool filters() const { return options().policy.filters(); }
  // Reads rows; a missing key reads its initial row, or `no_permission` where a filter admits keys,
  // and is not inserted.
  virtual void Find(CallContext context, const uint64_t* keys, int64_t num_keys,  // [num_keys]
                    float* rows,                                                  // [num_keys, dim]
                    uint8_t* found) const = 0;  // [num_keys] or null
  // What the weight decay of all steps has left of an initial row, 1 without any.
  virtual double InitialRowScale(CallContext context) const = 0;
  // Zeros in the table's memory, in place of rows that could not be read.
  virtual void WriteZeros(CallContext context, float* rows, int64_t num_rows) const = 0;
  // Missing keys are inserted with their initial row. All or nothing: throws std::length_error
  // (naming table, max_capacity, size and the number of new keys) before anything changed.
  // inserted: [num_keys] or null; 1 at one position of each new key, on the host the first.
  virtual void FindOrInsert(CallContext context, const uint64_t* keys, int64_t num_keys,
                            float* rows, uint8_t* inserted) = 0;
  // Writes rows, inserting missing keys; of equal keys the last wins. Slot rows of present keys
  // stay.
  virtual void Assign(CallContext context, const uint64_t* keys, int64_t num_keys,
                      const float* rows) = 0;
  // Returns the number of keys removed.
  virtual int64_t Erase(CallContext context, const uint64_t* keys, int64_t num_keys) = 0;
  // Removes all keys, keeps options and slots; frees memory.
  virtual void Clear(CallContext context) = 0;
  virtual void Reserve(CallContext context, int64_t num_keys) = 0;  // room for so many in all
  virtual int64_t Size(CallContext context) const = 0;
  virtual MemoryStats Stats(CallContext context) const = 0;  // visits every key

  // Keys ascending by uint64 value, rows caught up. `evict`: calls Evict first, where there is a
  // policy for it.
  TableSnapshot Export(CallContext context, bool with_slots, bool evict = false);
  // Export in parts, without a copy of the table. The table must live longer.
  virtual std::unique_ptr<TableReader> OpenContent(CallContext context, bool with_slots,
                                                   bool evict = false) = 0;
  // What changed since the instant `since`, with slots, after Evict where there is a policy for it:
  // the rest of a dump whose base came before (changes.h). 0: everything; a table keeps what changes
  // from its first call on. Throws std::invalid_argument where the table no longer keeps it, and for
  // tables in device memory.
  virtual std::unique_ptr<TableReader> OpenChanges(CallContext context, int64_t since);
  // Nothing has changed as of now: the content is a dump's. This instant's number; 0: not kept.
  virtual int64_t KeepChanges(CallContext context);
  // Inserts or overwrites keys with rows and slot rows; of equal keys the last wins. Slots that the
  // snapshot lacks get their initial value; slots that this table has not (yet) are configured from
  // the snapshot's names and widths, so that they survive until an optimizer attaches. NaN in a slot
  // row means not known: the slot's initial value takes its place. `replace`: the snapshot becomes
  // the table's whole content, which is made aside first, so that a failure costs nothing.
  virtual void Import(CallContext context, const TableSnapshot& snapshot, bool replace = false) = 0;
  // An empty table of the same options and slots, for content that is to replace this one's.
  virtual std::unique_ptr<Table> MakeAside(CallContext context) const = 0;
  // Replaces the content by that of a table that MakeAside made, which must not be used again.
  // Throws only where slots were configured meanwhile and memory runs out; nothing has changed then.
  virtual void TakeContent(CallContext context, Table& aside) = 0;

  // Lays rows out for these slots. Configuring the same ones again is a no-op; slots of equal name
  // and width are kept, others get their initial value. The initial value of a slot may be NaN, not
  // known yet: when another is known, the rows that hold NaN get it.
  virtual void ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) = 0;
  virtual std::vector<SlotVariableSpec> Slots() const = 0;

  // ---- admission and eviction, of a table that keeps records; std::invalid_argument from one that
  // keeps none ----
  // A training lookup of all these keys: counts each once, inserts those that are admitted, evicts
  // by score where there is no room. The step advances by one. All or nothing: throws
  // std::length_error where the keys of the call alone are too many, or the table is full.
  virtual void RecordTrainingLookup(CallContext context, const uint64_t* keys,
                                    int64_t num_keys) = 0;
  // Removes keys that have outlived their steps or fallen below the threshold; how many.
  virtual int64_t Evict(CallContext context) = 0;
  virtual EvictedRows PopEvicted() = 0;
  virtual PolicyCounts Statistics(CallContext context) const = 0;
  // All [num_keys]. A key never seen: 0 and -1.
  virtual void KeyStatistics(CallContext context, const uint64_t* keys, int64_t num_keys,
                             uint8_t* present, int64_t* frequencies, int64_t* last_steps) const = 0;
  // Missing keys are passed over; returns how many were there. Of equal keys the last wins.
  virtual int64_t AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                               const int64_t* scores) = 0;
  virtual void SetStep(int64_t step) = 0;  // the next training lookup is step + 1
};

// ---- what tables of every memory check and say alike: std::invalid_argument ----
void RequireHashtable(const TableOptions& options);  // of Erase
// The parts of a snapshot are of one size, and its rows of the table's.
void CheckSnapshot(const TableSnapshot& snapshot, const TableOptions& options);
// A table's slots and behind them those of a snapshot that it lacks. Of these the initial value is
// NaN, not known, until an optimizer says it. Throws where widths differ.
std::vector<SlotVariableSpec> SlotsWithThoseOf(const TableSnapshot& snapshot,
                                               const std::vector<SlotVariableSpec>& slots,
                                               const TableOptions& options);
// A table's slots, and behind them those that only the content aside has.
std::vector<SlotVariableSpec> SlotsWithThoseOf(const std::vector<SlotVariableSpec>& aside,
                                               const std::vector<SlotVariableSpec>& slots);
// Names the saved ones of these slots in the snapshot.
void NameSavedSlots(const std::vector<SlotVariableSpec>& slots, TableSnapshot* snapshot);

}  // namespace sok

#endif  // SOK_CORE_TABLE_H_
