// Inside of CudaTable, shared by table_keys.cu, table_many.cu (keys of many tables), table_room.cu
// (growth), table_state.cu (memory, slots), table_reader.cu (export), table_snapshot.cu (import),
// table_direct.cu (without a hashtable), table_policy.cu (admission), table_records.cu and
// table_evict.cu.
#ifndef SOK_CORE_CUDA_TABLE_TABLE_IMPL_H_
#define SOK_CORE_CUDA_TABLE_TABLE_IMPL_H_

#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "cpp/core/cuda/index/size_bound.h"
#include "cpp/core/cuda/policies/record_kernels.cuh"
#include "cpp/core/cuda/policies/records.h"
#include "cpp/core/cuda/rows/history.h"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/direct_rows.h"

namespace sok {
namespace cuda {

inline constexpr int64_t kPieceKeys = int64_t{1} << 20;    // imported at a time
inline constexpr int64_t kPieceFloats = int64_t{1} << 24;  // to or from the host at a time: 64 MiB

// Chunks of rows and the device array of their addresses.
struct DeviceArena {
  int64_t stride = 0;         // floats from a row to the next
  int64_t num_chunks = 0;     // allocated
  Buffer pointers;            // [>= num_chunks] float*
  std::vector<Buffer> slabs;  // several chunks each

  int64_t bytes() const;
  // Async. Chunks stay where they are; only the array of addresses may be copied to a larger one.
  void Reserve(Stream stream, int64_t wanted_chunks, int64_t chunk_rows);
};

// The actual number: waits if only the device knows it.
int64_t OnHost(Stream stream, const Count& count);

// Throws std::invalid_argument unless a batch may have so many keys.
void CheckBatch(int64_t num_keys, const TableOptions& options);

struct CudaTable::Impl {
  Impl(const TableOptions& table_options, double load_factor, Stream first_stream);
  ~Impl();

  // Orders `next` after the stream of the last call. Throws CudaError unless the table's device is
  // the current one.
  void Use(Stream next);
  // Locks the table, then Use.
  [[nodiscard]] std::unique_lock<HeldMutex> Enter(Stream next);

  // ---- what the host knows of the counters ----
  void StartCopy();
  // Work that writes host_counters was put on the stream. One point of it serves all these tables.
  static void CopiesAreUnderWay(const std::vector<Impl*>& tables);
  void WaitForCopy();
  void LearnCounters();               // exactly; waits
  void PollCounters(uint64_t round);  // never waits
  void CountBatch(int64_t num_keys);
  void TakeCounters();  // from pinned memory

  // ---- room ----
  int64_t most() const;  // keys that the table may hold
  int64_t MaxUsed(int64_t buckets) const;
  int64_t chunk_rows() const { return int64_t{1} << chunk_shift; }
  bool HasRoom(int64_t num_keys) const;
  // Makes room for a batch and adds it to the bounds. Throws std::length_error.
  // `num_missing`: what LearnMisses found; -1 if it was not called.
  void MakeRoom(const uint64_t* keys, int64_t num_keys, const uint32_t* num_actual,
                int64_t num_missing = -1, uint64_t round = StreamPoint::NextRound());
  // A batch that might fill its table, if all its keys were new.
  struct Newcomers {
    Impl* impl;
    const uint64_t* keys;
    Count num_keys;
    int64_t num_missing = -1;  // positions whose key is missing
  };
  bool MayFill(int64_t num_keys) const { return size.bound() + num_keys > most(); }
  // Fills in num_missing of different tables and what the host knows of their counters. Waits once.
  static void LearnMisses(Stream stream, std::vector<Newcomers>* batches);
  int64_t CountNew(const uint64_t* keys, int64_t num_keys);
  // Makes room and returns what to launch. If its `host_counters` is set, CopiesAreUnderWay
  // must follow the launch.
  InsertBatch MakeInsert(const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                         uint8_t* inserted, const uint32_t* num_actual, int64_t num_missing = -1,
                         uint64_t round = StreamPoint::NextRound());
  // Makes room for so many new keys, and for at least `ahead` that may follow them.
  void GrowFor(int64_t num_keys, int64_t ahead = 0) { GrowFor(num_keys, ahead, most()); }
  void GrowFor(int64_t num_keys, int64_t ahead, int64_t most_rows);
  void ResizeIndex(int64_t new_num_buckets);
  void ReserveFreeRows();  // for every row number that was given out; async

  // ---- without a hashtable ----
  bool is_direct() const { return direct.num_rows > 0; }
  void MakeDirectRows();
  struct DirectBatch {
    Impl* table;
    const uint64_t* keys;
    Count num_keys;
    uint32_t* row_numbers;
  };
  // Row numbers of keys. Waits once; throws std::out_of_range if a key is not its table's.
  static void FindDirectRows(Stream stream, const std::vector<DirectBatch>& batches);
  void FindDirect(const uint64_t* keys, int64_t num_keys, float* out, uint8_t* found);

  // ---- admission and eviction; all but Records need `records` ----
  DeviceRecords& Records() const;  // throws std::invalid_argument if there are none
  // Classifies the keys of a call at `step`. Waits, and changes nothing.
  KeyBatch Classify(const uint64_t* keys, int64_t num_keys, bool distinct, int64_t step,
                    const FilterRef& filter);
  // Rows to evict, with scratch of the workspace and copies for the buffer.
  struct Leaving {
    const uint32_t* rows = nullptr;  // [count], in this order
    int64_t count = 0;
    uint64_t* keys = nullptr;  // [count]
    std::list<EvictedRow> buffered;
  };
  // A training lookup that only remains to be made. Its scratch lives as long as it.
  struct TrainingLookup {
    Impl* table;
    Workspace::Scope scope;
    KeyBatch batch;
    int64_t step;
    Leaving leaving;
  };
  // All that may fail; changes nothing that is read. `distinct`: no key repeats.
  std::unique_ptr<TrainingLookup> PrepareTrainingLookup(const uint64_t* keys, int64_t num_keys,
                                                        bool distinct = false);
  void MakeTrainingLookup(TrainingLookup* lookup);  // does not fail
  // Inserts keys that are written and not looked up.
  KeyBatch InsertWritten(const uint64_t* keys, int64_t num_keys);
  // 1 at the first position of each key, in the workspace; null unless `asked`.
  const uint8_t* FirstPositions(const uint64_t* keys, int64_t num_keys, bool asked);
  // Makes room for the admitted keys. If others must leave for them, returns these: EvictRows must
  // come before InsertAdmitted. Throws std::length_error, or CudaError if memory runs out.
  // `may_exceed`: a write, after which EvictSurplus follows.
  [[nodiscard]] Leaving MakeRoomFor(const KeyBatch& batch, bool may_exceed = false);
  // Evicts what a write has brought beyond max_capacity; returns the number of keys.
  int64_t EvictSurplus();
  void MakeRoomInFilter(const KeyBatch& batch);
  void InsertAdmitted(const KeyBatch& batch, const int64_t* frequencies, int64_t step);
  void ForgetWaiting(const uint64_t* keys, int64_t num_keys);
  void BoundWaiting();  // may wait
  Leaving ChooseLowest(const KeyBatch& batch, int64_t count);
  Leaving PrepareEviction(const uint32_t* rows, int64_t count);
  void EvictRows(Leaving leaving);                              // does not fail
  void ForgetBuffered(const uint64_t* keys, int64_t num_keys);  // may wait
  int64_t Evict();
  void ExpireWaiting();
  // Reads the records of rows [num_keys], in this order, into host memory [num_keys, 3].
  void ReadRecords(const uint32_t* rows, int64_t num_keys, int64_t* out);
  void ExportCounters(RecordSnapshot* snapshot);  // all but the records
  void ImportRecords(const RecordSnapshot& snapshot, const uint64_t* keys, const uint32_t* rows,
                     int64_t num_keys);

  void CatchUpAll();
  void ForgetSteps();  // no row owes anything; the steps' weight decay goes to initial_row_scale
  double InitialRowScale() const;
  // All but the optimizer's history. The host must know the counters of both.
  void SwapContent(Impl& other) noexcept;
  TableRef Ref() const;

  const TableOptions options;
  const double max_load_factor;
  const int device;
  HeldMutex mutex;
  Initializer initializer;  // default rows in device memory
  const DirectRows direct;
  Stream stream;
  Workspace workspace;

  Buffer buckets;
  int64_t num_buckets = 0;
  int chunk_shift = 0;
  DeviceArena arena;
  Buffer default_rows;
  Buffer counters;                          // Counters
  Counters* host_counters = nullptr;        // pinned
  std::shared_ptr<StreamPoint> own_point;   // of copies of this table
  std::shared_ptr<StreamPoint> copy_point;  // behind the last copy: own_point, or another table's
  Buffer free_rows;                         // [capacity] uint32

  SizeBound used, rows, size;  // of Counters used, next_row, size

  std::vector<SlotVariableSpec> slots;
  std::vector<float> slot_initial;
  Buffer device_slot_initial;
  std::unique_ptr<History> history;
  double initial_row_scale = 1.0;  // weight decay of steps that no history remembers
  StepNumber step_number;
  bool is_aside = false;                   // see MakeAside
  std::unique_ptr<DeviceRecords> records;  // null without policies
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_TABLE_TABLE_IMPL_H_
