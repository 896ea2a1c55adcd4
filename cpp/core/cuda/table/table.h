// CudaTable: one rank's shard of a table in device memory. The owner; kernels take a TableRef.
//
//     key -> hash -> bucket -> row number -> chunk of the arena -> row
//
// As on the CPU: index and rows are separate, buckets have 16 digests, chunks never move, slot rows
// follow each row, initial rows are a pure function of (seed, table name, key, column), and rows
// that owe steps are brought up when they are read. Differences:
//
// * All threads insert a batch at once, by compare-and-swap (probe.h). Their order decides which
//   row *number* a key gets, but not the row.
// * Only the device knows the size. The host keeps an upper bound (size_bound.h) and makes room for
//   a batch before it launches the kernels: chunks for the rows, and an index of twice the size
//   when more than `max_load_factor` of the slots may be in use. All of it is work on the stream.
//   The host waits, to learn the real size, only when the bound says that memory must grow or that
//   the batch might exceed max_capacity.
// * Erased slots are used again after the next rehash, row numbers at once.
//
// Every call takes the stream it works on. A call on another stream than the last is ordered after
// it on the device; the caller must order its own arrays. The device that is current when the table
// is made must be current at each call, or CudaError is thrown. "Async": does not wait for the
// device in a warm step. Pointers are to device memory unless the name says host.
//
// With policies (core/policy.h) the table keeps one record per key (records.h). A training lookup
// then goes through RecordTrainingLookup, which decides which keys get a row and which make room;
// FindOrInsert calls it by itself, and every call that may insert waits for the device once.
// A table without policies keeps no records and pays nothing for them.
//
// With use_hashtable=false there is no index: the row number is key / world_size. The constructor
// takes memory for all max_capacity rows and writes their initial rows; Clear writes them again.
// Every call that takes keys waits for the device once, so that it can throw std::out_of_range for
// a key of another rank or beyond the range before anything has changed. Erase throws
// std::invalid_argument.
#ifndef SOK_CORE_CUDA_TABLE_TABLE_H_
#define SOK_CORE_CUDA_TABLE_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/rows/table_ref.h"
#include "cpp/core/cuda/table/held_mutex.h"
#include "cpp/core/optimizer.h"
#include "cpp/core/step_number.h"
#include "cpp/core/table.h"

namespace sok {
namespace cuda {

class History;

class CudaTable final : public Table {
 public:
  // Throws CudaError if there is no device. max_load_factor in (0, 0.97]: the share of the slots
  // that may be in use before the index grows.
  explicit CudaTable(const TableOptions& options, double max_load_factor = 0.875,
                     Stream stream = nullptr);
  ~CudaTable() override;
  CudaTable(const CudaTable&) = delete;
  CudaTable& operator=(const CudaTable&) = delete;

  // ---- whole calls (core/table.h), on the context's stream: each takes the lock. Find,
  // FindOrInsert, Assign and KeyStatistics are async; the others wait ----
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
  int64_t Size(CallContext context) const override;
  MemoryStats Stats(CallContext context) const override;
  std::unique_ptr<TableReader> OpenContent(CallContext context, bool with_slots,
                                           bool evict = false) override;
  void Import(CallContext context, const TableSnapshot& snapshot, bool replace = false) override;
  std::unique_ptr<Table> MakeAside(CallContext context) const override;
  void TakeContent(CallContext context, Table& aside) override;
  // Both layouts exist for a moment. All rows are brought up to date first, and the optimizer must
  // be attached again.
  void ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) override;
  std::vector<SlotVariableSpec> Slots() const override;
  void RecordTrainingLookup(CallContext context, const uint64_t* keys, int64_t num_keys) override;
  int64_t Evict(CallContext context) override;
  EvictedRows PopEvicted() override;  // from host memory
  PolicyCounts Statistics(CallContext context) const override;
  void KeyStatistics(CallContext context, const uint64_t* keys, int64_t num_keys, uint8_t* present,
                     int64_t* frequencies, int64_t* last_steps) const override;
  int64_t AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                       const int64_t* scores) override;
  void SetStep(int64_t step) override;

  // ---- parts, for fused code: the caller holds the lock as long as row numbers must stay valid.
  // It may make whole calls meanwhile ----
  HeldMutex& mutex() const;
  Stream stream() const;  // of the last call
  // Async. kNoRow for missing keys.
  void FindRows(Stream stream, const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers);
  // Async. As FindOrInsert, without the rows. `num_actual`: in device memory, the number of keys if
  // it is less than num_keys; null for num_keys. A table that evicts by score may then hold more
  // than max_capacity, until it is written to again.
  void FindOrInsertRows(Stream stream, const uint64_t* keys, int64_t num_keys,
                        uint32_t* row_numbers, uint8_t* inserted,
                        const uint32_t* num_actual = nullptr);
  // Async. Reads rows by number. kNoRow reads `no_permission` and is allowed only if the table
  // filters keys. A row number stays valid until its key is erased or evicted.
  void GatherRows(Stream stream, const uint32_t* row_numbers, int64_t num_rows, float* rows);
  // ---- the same for many tables, in shared launches. A table may occur several times ----
  struct TableFind {
    CudaTable* table;
    const uint64_t* keys;  // [num_keys]
    int64_t num_keys;
    RowPlaces rows;  // [num_keys]
  };
  struct TableKeys {
    CudaTable* table;
    const uint64_t* keys;  // [num_keys]
    int64_t num_keys;
    uint32_t* row_numbers;                 // [num_keys]
    const uint32_t* num_actual = nullptr;  // as above
    bool distinct = false;                 // no key repeats: spares a table with policies a search
  };
  struct TableRows {
    CudaTable* table;
    const uint32_t* row_numbers;  // [num_rows]
    int64_t num_rows;
    RowPlaces rows;  // [num_rows]
  };
  static void Find(Stream stream, const std::vector<TableFind>& batches);
  // A training lookup of all tables. If it throws, none of them has changed: all memory is reserved
  // first, and all keys that must leave are chosen. kNoRow for keys that a filter refuses.
  static void FindOrInsertRows(Stream stream, const std::vector<TableKeys>& batches);
  static void FindOrInsert(Stream stream, const std::vector<TableFind>& batches);
  static void GatherRows(Stream stream, const std::vector<TableRows>& batches);

  int64_t row_floats() const;

  // Throws std::invalid_argument if the table has another optimizer.
  void CheckOptimizer(const OptimizerOptions& options) const;
  // The optimizer of the table, attached (with its slots) at the first call. Throws as above.
  History& Attach(Stream stream, const OptimizerOptions& options);
  // Async. Brings all rows up if the history is full, and reserves host memory for one step, so
  // that AppendStep does not fail.
  void MakeRoomForStep(Stream stream);
  // Async. Appends a step of tables with the same optimizer, whose rows owe steps.
  static void AppendStep(Stream stream, const std::vector<CudaTable*>& tables, float learning_rate,
                         int64_t step);
  // Async. Counts the positions with kNoRow: keys whose gradient finds no row.
  void CountDroppedGradients(Stream stream, const uint32_t* row_numbers, int64_t num_rows,
                             const uint32_t* num_actual);
  StepNumber& step_number() const;  // of the optimizer
  TableRef Ref() const;
  // The same for the caller's kernels on this stream, which are ordered after the last call.
  TableRef Ref(Stream stream);
  Workspace& workspace();

 private:
  // ConfigureSlots; with `keeps` false all slots get their initial values.
  void LayOutSlots(Stream stream, const std::vector<SlotVariableSpec>& specs, bool keeps);

  class Reader;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_TABLE_TABLE_H_
