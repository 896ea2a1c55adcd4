// CudaTable: one rank's shard of a table in device memory. The owner; kernels take a TableRef.
//
//     key -> hash -> bucket -> row number -> chunk of the arena -> row
//
// What is as on the CPU: index and rows apart, buckets of 16 digests, chunks that never move, slot
// rows behind each row, initial rows as a pure function of (seed, table name, key, column), rows
// that owe steps and are brought up when they are read. What differs:
//
// * A batch is inserted by all threads at once, by compare-and-swap (probe.h). Which row *number* a
//   key gets depends on their order; rows do not.
// * The size is known to the device alone. The host keeps an upper bound (size_bound.h) and makes
//   room for a batch before it launches the kernels: chunks for the rows, and an index of twice the
//   size when more than `max_load_factor` of the slots may be in use. All of it is work on the
//   stream. The host waits only when the bound says that memory must grow, to learn the real size
//   first, and within one batch of max_capacity.
// * Erased slots are used again after the next rehash, row numbers at once.
//
// Every call takes the stream it works on. A call on another stream than the last is put behind it
// on the device; what the caller's own arrays need is up to the caller. The device that is current
// when the table is made must be current at each call, or CudaError is thrown. "Async": does not
// wait for the device in a warm step. Pointers are to device memory unless the name says host. One
// host thread at a time.
//
// With policies (core/policy.h) the table keeps a record a key (records.h). Then a training lookup
// goes through Observe, which decides which keys get a row and which make room for them;
// FindOrInsert does so by itself, and every call that may insert waits for the device, once. A
// table without policies has none of this and pays nothing for it.
//
// With use_hashtable=false there is no index: the row number is key / world_size, and memory for
// all max_capacity rows is taken, and their initial rows written, when the table is made. Clear
// writes them again. Every call that takes keys waits for the device once, so that it can throw
// std::out_of_range for a key of another rank or beyond the range before anything has changed.
// Erase throws std::invalid_argument.
#ifndef SOK_CORE_CUDA_TABLE_H_
#define SOK_CORE_CUDA_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cuda/device.h"
#include "cpp/core/cuda/table_ref.h"
#include "cpp/core/key_records.h"
#include "cpp/core/optimizer.h"
#include "cpp/core/slots.h"
#include "cpp/core/table_options.h"

namespace sok {
namespace cuda {

class History;

struct DeviceTableStats {
  int64_t size = 0;
  int64_t capacity = 0;      // keys that fit before the index grows
  int64_t max_capacity = 0;  // 0: unbounded
  int64_t num_buckets = 0;
  double load_factor = 0.0;        // slots in use, erased ones included / slots allocated
  double mean_probe_length = 0.0;  // buckets visited to find a present key
  int64_t max_probe_length = 0;
  int64_t index_bytes = 0;
  int64_t arena_bytes = 0;
  int64_t bytes = 0;
};

class CudaTable {
 public:
  // Throws CudaError where there is no device. max_load_factor in (0, 0.97]: of the slots, the
  // share that may be in use before the index grows.
  explicit CudaTable(const TableOptions& options, double max_load_factor = 0.875,
                     Stream stream = nullptr);
  ~CudaTable();
  CudaTable(const CudaTable&) = delete;
  CudaTable& operator=(const CudaTable&) = delete;

  const TableOptions& options() const;
  int64_t dim() const;
  Stream stream() const;  // of the last call

  // Async. Reads rows; a missing key reads its initial row, or `no_permission` where a filter
  // admits keys, and is not inserted.
  void Find(Stream stream, const uint64_t* keys, int64_t num_keys,  // [num_keys]
            float* rows,                                            // [num_keys, dim]
            uint8_t* found);                                        // [num_keys] or null
  // Async. kNoRow where the key is missing.
  void FindRows(Stream stream, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers);
  // Async. Missing keys are inserted with their initial row. Keys may repeat. `inserted`:
  // [num_keys] or null; 1 at one position of each new key. All or nothing: throws std::length_error
  // as the CPU's table does. `num_actual`: in device memory, the number of keys if it is less than
  // num_keys; null for num_keys.
  void FindOrInsertRows(Stream stream, const uint64_t* keys, int64_t num_keys,
                        uint32_t* row_numbers, uint8_t* inserted,
                        const uint32_t* num_actual = nullptr);
  // Async. Both of the above: FindOrInsertRows, then the rows.
  void FindOrInsert(Stream stream, const uint64_t* keys, int64_t num_keys, float* rows,
                    uint8_t* inserted);
  // Async. Rows by number, none of them kNoRow (which reads `no_permission` where a filter admits
  // keys); a row number stays valid until its key is erased or evicted.
  void GatherRows(Stream stream, const uint32_t* row_numbers, int64_t num_rows, float* rows,
                  const uint32_t* num_actual = nullptr);
  // ---- the same for many tables, in the launches of one. A table may occur several times ----
  struct TableFind {
    CudaTable* table;
    const uint64_t* keys;  // [num_keys]
    int64_t num_keys;
    float* rows;  // [num_keys, dim]
  };
  struct TableKeys {
    CudaTable* table;
    const uint64_t* keys;  // [num_keys]
    int64_t num_keys;
    uint32_t* row_numbers;                 // [num_keys]
    const uint32_t* num_actual = nullptr;  // as above
  };
  struct TableRows {
    CudaTable* table;
    const uint32_t* row_numbers;  // [num_rows]
    int64_t num_rows;
    float* rows;  // [num_rows, dim]
  };
  static void Find(Stream stream, const std::vector<TableFind>& batches);
  // Of the tables with a hashtable that keep no records and occur once, all take their keys or none
  // does.
  static void FindOrInsertRows(Stream stream, const std::vector<TableKeys>& batches);
  static void FindOrInsert(Stream stream, const std::vector<TableFind>& batches);
  static void GatherRows(Stream stream, const std::vector<TableRows>& batches);

  // Async. Writes rows, inserting missing keys; of equal keys the last wins. Slot rows stay.
  void Assign(Stream stream, const uint64_t* keys, int64_t num_keys, const float* rows);

  // Waits. Returns the number of keys removed.
  int64_t Erase(Stream stream, const uint64_t* keys, int64_t num_keys);
  void Clear(Stream stream);                      // waits; frees memory
  void Reserve(Stream stream, int64_t num_keys);  // waits; makes room for so many keys in all
  int64_t Size(Stream stream);                    // waits
  DeviceTableStats Stats(Stream stream);          // waits

  // Waits. Keys ascending by uint64 value and whole rows [size, dim | slot rows], caught up.
  void Export(Stream stream, std::vector<uint64_t>* host_keys, std::vector<float>* host_rows);
  // Waits. The reverse: inserts or overwrites whole rows. Keys must not repeat.
  void Import(Stream stream, const uint64_t* host_keys, int64_t num_keys, const float* host_rows);
  // The same with what policies know, which is empty without them. The form is the CPU's: what one
  // exported the other imports. `evict`: calls Evict first, where there is a policy for it.
  void Export(Stream stream, std::vector<uint64_t>* host_keys, std::vector<float>* host_rows,
              RecordSnapshot* policy, bool evict = false);
  // `replace`: clears the table first, once the snapshot has been checked.
  void Import(Stream stream, const uint64_t* host_keys, int64_t num_keys, const float* host_rows,
              const RecordSnapshot& policy, bool replace = false);

  // ---- admission and eviction, of a table that keeps records; std::invalid_argument from one that
  // keeps none ----
  bool keeps_records() const;
  bool filters() const;  // keys without a row read `no_permission`
  // Waits. A training lookup of all these keys, which may repeat: counts each once, inserts those
  // that are admitted, evicts by score where there is no room. The step advances by one. All or
  // nothing: throws std::length_error where the keys of the call alone are too many, or the table
  // is full.
  void Observe(Stream stream, const uint64_t* keys, int64_t num_keys);
  // Waits. Removes keys that have outlived their steps or fallen below the threshold; how many.
  int64_t Evict(Stream stream);
  EvictedRows PopEvicted();                    // from host memory
  PolicyStatistics Statistics(Stream stream);  // waits
  // Async. All [num_keys]. A key never seen: 0 and -1.
  void KeyStatistics(Stream stream, const uint64_t* keys, int64_t num_keys, uint8_t* present,
                     int64_t* frequencies, int64_t* last_steps);
  // Waits. Missing keys are passed over; returns how many were there. Of equal keys the last wins.
  int64_t AssignScores(Stream stream, const uint64_t* keys, int64_t num_keys,
                       const int64_t* scores);
  void SetStep(int64_t step);  // the next training lookup is step + 1

  // Lays rows out for these slots; slots of equal name and width are kept, others get their initial
  // value. Waits; both layouts exist for a moment. Slots that move are caught up first, and the
  // optimizer must be attached again. The initial value of a slot may be NaN, not known yet: when
  // another is known, the rows that hold NaN get it.
  void ConfigureSlots(Stream stream, const std::vector<SlotSpec>& specs);
  std::vector<SlotSpec> slots() const;
  int64_t row_floats() const;

  // ---- for fused code in core/cuda ----
  // Throws std::invalid_argument if the table has another optimizer, or slots of other widths.
  void CheckOptimizer(const OptimizerOptions& options) const;
  // The optimizer of the table, attached (with its slots) if it has none yet. Throws as above.
  History& Attach(Stream stream, const OptimizerOptions& options);
  // Async. Brings all rows up when the history has no room for another step, and takes the host
  // memory of one, so that AppendStep does not fail.
  void MakeRoomForStep(Stream stream);
  // Async. Of tables with the same optimizer, whose rows owe steps.
  static void AppendStep(Stream stream, const std::vector<CudaTable*>& tables, float learning_rate,
                         int64_t step);
  // Async. Positions with kNoRow are keys whose gradient finds no row.
  void CountDroppedGradients(Stream stream, const uint32_t* row_numbers, int64_t num_rows,
                             const uint32_t* num_actual);
  TableRef Ref() const;
  // The same for kernels of the caller's on this stream, which come behind the last call.
  TableRef Ref(Stream stream);
  Workspace& workspace();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_TABLE_H_
