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
// Not here: tables without a hashtable, and Adam with a beta_2 so low that its missed steps have to
// be walked one by one (adam_replay.h: kAdamSteps). Both throw std::invalid_argument.
#ifndef SOK_CORE_CUDA_TABLE_H_
#define SOK_CORE_CUDA_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cuda/device.h"
#include "cpp/core/cuda/table_ref.h"
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
  double load_factor = 0.0;  // slots in use, erased ones included / slots allocated
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

  // Async. Reads rows; a missing key reads its initial row and is not inserted.
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
  // Async. Rows by number, none of them kNoRow; a row number stays valid until its key is erased.
  void GatherRows(Stream stream, const uint32_t* row_numbers, int64_t num_rows, float* rows,
                  const uint32_t* num_actual = nullptr);
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

  // Lays rows out for these slots; slots of equal name and width are kept, others get their initial
  // value. Waits; both layouts exist for a moment. Slots that move are caught up first, and the
  // optimizer must be attached again. The initial value of a slot may be NaN, not known yet: when
  // another is known, the rows that hold NaN get it.
  void ConfigureSlots(Stream stream, const std::vector<SlotSpec>& specs);
  std::vector<SlotSpec> slots() const;
  int64_t row_floats() const;

  // ---- for fused code in core/cuda ----
  // The optimizer of the table, attached (with its slots) if it has none yet. Throws
  // std::invalid_argument if it has another.
  History& Attach(Stream stream, const OptimizerOptions& options);
  // Async. Brings all rows up when the history has no room for another step.
  void MakeRoomForStep(Stream stream);
  void AppendStep(Stream stream, float learning_rate, int64_t step);
  TableRef Ref() const;
  Workspace& workspace();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_TABLE_H_
