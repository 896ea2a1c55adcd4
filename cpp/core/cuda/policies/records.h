// What a table with policies knows of its keys, in device memory. Decisions: core/policy.h; the
// same on the CPU: core/cpu/records.h.
//
//     row number r -> records[r]  | key | frequency | last step | custom score |   32 bytes: the
//                                                                   unit that device memory moves
//     waiting keys -> a table of its own, whose "rows" are  | count, 8 | last step + 1, 8 |
//       or, Bloom:    counters of 1 to 8 bytes, at the CPU's places (core/bloom.h)
//     evicted rows -> a buffer in host memory (core/evicted_buffer.h)
//
// The exact filter is a CudaTable of four-float rows because it needs all that one has: insertion
// by all threads, growth without waiting, erasing. A new row of zeros reads "never seen".
//
// The step and the counts of keys are the host's: every call that changes them waits for the device
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

// What a record says of importance: larger stays longer. In the order of unsigned numbers, so that
// it can be taken apart into digits.
SOK_HD inline uint64_t OrderedScore(const DeviceRecord& record, ScoreKind kind) {
  const int64_t score = kind == ScoreKind::kLru   ? record.last_step
                        : kind == ScoreKind::kLfu ? record.frequency
                                                  : record.score;
  return static_cast<uint64_t>(score) ^ (uint64_t{1} << 63);
}

// Where a selection of the lowest rows ended, for the next one: see lowest.cuh.
struct LowestHint {
  explicit LowestHint(Stream stream);

  void Forget();  // async

  Buffer end;           // uint64 [2]: score and key up to which rows were taken
  int slack_bits = 64;  // the next ones are looked for up to 2^slack_bits beyond it
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
  // Room for records of rows below `num_rows`; new ones hold no key. Async.
  void Reserve(Stream stream, int64_t num_rows);
  void Clear(Stream stream);  // waits

  DeviceRecord* data() const { return records.as<DeviceRecord>(); }
  FilterRef Filter() const;
  bool has_scores() const { return options.score == ScoreKind::kCustom; }
  bool is_bloom() const { return options.filters() && options.bloom_max_keys > 0; }

  // Counters of a Bloom filter, and back. Wait.
  std::vector<int64_t> ExportCounters(Stream stream) const;
  void ImportCounters(Stream stream, const std::vector<int64_t>& counters);
  // Keys of the exact filter, ascending. Waits.
  std::vector<WaitingKey> ExportWaiting(Stream stream) const;
  // Either filter takes keys: it counts at least what they say.
  void ImportWaiting(Stream stream, const std::vector<WaitingKey>& keys);

  const PolicyOptions options;
  int64_t step = 0;
  PolicyCounts statistics;  // of counts; size, buffered, waiting and step are filled in later
  Buffer records;           // DeviceRecord [rows there is memory for]
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
