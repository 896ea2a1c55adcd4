// DeviceRecords: what a table with policies stores about its keys, in device memory. Decisions:
// core/policy.h; the same on the CPU: core/cpu/records.h.
//
//     row number r -> records[r]  | key | frequency | last step | custom score |   32 bytes: one
//                                                                     sector of device memory
//     waiting keys -> a table of its own, whose "rows" are  | count, 8 | last step + 1, 8 |
//       or, Bloom:    counters of 1 to 8 bytes, at the CPU's places (core/bloom.h)
//     evicted rows -> a buffer in host memory (core/evicted_buffer.h)
//
// The exact filter is a CudaTable of four-float rows because it needs what a table has: insertion
// by all threads, growth without waiting, erasing. A new row of zeros means "never seen".
//
// The host keeps the step and the counts of keys. Every call that changes them waits for the device
// once, to learn how many keys it admits.
//
// Invariants, since the table was made, cleared or replaced:
//     seen    == found + admitted + refused
//     size    == admitted + written - evicted - erased
//     evicted == popped + buffered + dropped
#ifndef SOK_CORE_CUDA_POLICIES_RECORDS_H_
#define SOK_CORE_CUDA_POLICIES_RECORDS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/bloom.h"
#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/rows/table_ref.h"
#include "cpp/core/evicted_buffer.h"
#include "cpp/core/key_records.h"
#include "cpp/core/policy.h"

namespace sok {
namespace cuda {

struct alignas(16) DeviceRecord {
  uint64_t key;
  int64_t frequency;
  int64_t last_step;  // -1: no key in this row
  int64_t score;      // custom scores only, else 0
};
static_assert(sizeof(DeviceRecord) == 32, "a record is one sector of memory");

// The score of a record: larger stays longer. In the order of unsigned numbers, so that it can be
// split into digits.
SOK_HD inline uint64_t OrderedScore(const DeviceRecord& record, ScoreKind kind) {
  const int64_t score = kind == ScoreKind::kLru   ? record.last_step
                        : kind == ScoreKind::kLfu ? record.frequency
                                                  : record.score;
  return static_cast<uint64_t>(score) ^ (uint64_t{1} << 63);
}

// Where a selection of the lowest rows ended, for the next one: see select_lowest.cuh.
struct LowestHint {
  explicit LowestHint(Stream stream);

  void Forget();  // async

  Buffer end;           // uint64 [2]: score and key up to which rows were taken
  int slack_bits = 64;  // the next survey lists rows up to 2^slack_bits beyond it
  bool was_used = false;
};

// The row of a waiting key.
struct alignas(16) WaitingRow {
  int64_t count;
  int64_t next_step;  // last step + 1; 0: not known
};
inline constexpr int64_t kWaitingFloats = sizeof(WaitingRow) / sizeof(float);

// The filter, for kernels.
struct FilterRef {
  int64_t filter_freq = 0;  // 0 and 1: every key is admitted
  bool is_exact = false;
  bool is_bloom = false;
  TableRef waiting;  // exact
  BloomShape bloom;
  int counter_bits = 64;
  void* counters = nullptr;  // [kNumShards, bloom.shard_counters]
};

class CudaTable;

struct DeviceRecords {
  DeviceRecords(const TableOptions& options, Stream stream);
  ~DeviceRecords();

  void MoveTo(Stream stream);
  int64_t bytes(Stream stream) const;
  // Makes room for records of rows below `num_rows`; new ones hold no key. Async.
  void Reserve(Stream stream, int64_t num_rows);
  void Clear(Stream stream);  // waits

  DeviceRecord* data() const { return records.as<DeviceRecord>(); }
  FilterRef Filter() const;
  bool has_scores() const { return options.score == ScoreKind::kCustom; }
  bool is_bloom() const { return options.filters() && options.bloom_max_keys > 0; }

  // Counters of a Bloom filter, to and from the host. Both wait.
  std::vector<int64_t> ExportCounters(Stream stream) const;
  void ImportCounters(Stream stream, const std::vector<int64_t>& counters);
  // Keys of the exact filter, ascending. Waits.
  std::vector<WaitingKey> ExportWaiting(Stream stream) const;
  // Both filters take keys: counts are then at least those given.
  void ImportWaiting(Stream stream, const std::vector<WaitingKey>& keys);

  const PolicyOptions options;
  int64_t step = 0;
  PolicyCounts statistics;             // without those that CudaTable::Statistics fills in
  Buffer records;                      // DeviceRecord [rows that the arena has memory for]
  std::unique_ptr<CudaTable> waiting;  // exact filter, or null
  BloomShape bloom;
  Buffer counters;           // of a Bloom filter
  Buffer dropped_gradients;  // uint64: keys of updates that had no row
  LowestHint hint;
  EvictedBuffer buffer;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_RECORDS_H_
