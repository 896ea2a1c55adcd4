// Whole batches on the records of a table: what policies are made of. Everything here is async.
//
// Names: `unique` are keys that occur once, `rows` row numbers, kNoRow where there is none.
#ifndef SOK_CORE_CUDA_POLICIES_RECORD_KERNELS_CUH_
#define SOK_CORE_CUDA_POLICIES_RECORD_KERNELS_CUH_

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/policies/records.h"

namespace sok {
namespace cuda {

struct BatchCounts {
  uint32_t present;   // had a row
  uint32_t found;     // of them, those not yet counted in this step
  uint32_t admitted;  // get one
  uint32_t refused;   // are kept waiting
  uint32_t counted;   // of them, those not yet counted in this step
};

// The keys of a call, classified; all in device memory, in the order of no particular thread.
struct ClassifiedKeys {
  uint32_t* rows = nullptr;        // [num_unique] before the call
  uint64_t* admitted = nullptr;    // [counts.admitted]
  int64_t* frequencies = nullptr;  // of them, this call included
  uint64_t* refused = nullptr;     // [counts.refused]
  BatchCounts* counts = nullptr;
};

// The distinct keys of a call on a table with policies. Device memory of the workspace.
struct KeyBatch {
  int64_t num_keys = 0;
  const uint64_t* unique = nullptr;  // [num_keys], filled up to *num_unique
  const int32_t* inverse = nullptr;  // [num_keys]; null where the keys came distinct
  uint32_t* num_unique = nullptr;    // a scalar; null where all num_keys are distinct
  ClassifiedKeys classified;
  uint32_t* new_rows = nullptr;      // [num_keys], of those admitted
  uint32_t* waiting_rows = nullptr;  // [num_keys], of those refused, in the exact filter
  BatchCounts counts = {};           // on the host

  Count distinct() const { return Count(num_keys, num_unique); }
};

// Reads what is known of each key in a lookup that will be `step`. Changes nothing but `out`.
void ClassifyKeys(Stream stream, const TableRef& table, const DeviceRecord* records,
                  const FilterRef& filter, const uint64_t* unique, Count num_unique, int64_t step,
                  const ClassifiedKeys& out);

// Keys got their rows. Null frequencies: 0, as of keys that were written and not looked up.
void AddRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                const int64_t* frequencies, int64_t num_keys, int64_t step);
// Counts a lookup in `step`: the records of rows, once a step.
void CountRows(Stream stream, DeviceRecord* records, const uint32_t* rows, Count num_rows,
               int64_t step);
// The same of keys that wait, by their rows in the exact filter or their counters.
void CountWaiting(Stream stream, const TableRef& waiting, const uint32_t* rows, int64_t num_rows,
                  int64_t step);
void CountInBloom(Stream stream, const FilterRef& filter, const uint64_t* unique, int64_t num_keys);
// Rows lose their keys. Row numbers may repeat.
void RemoveRecords(Stream stream, DeviceRecord* records, const uint32_t* rows, int64_t num_rows);

// inserted[i] = 1 where the call gave the key its row, and first[i].
void FlagInserted(Stream stream, const KeyBatch& batch, const uint32_t* rows_now,
                  const uint8_t* first, uint8_t* inserted);
// Sets the bits of rows. `bits` [rows / 32 + 1]
void MarkRows(Stream stream, const uint32_t* rows, Count num_rows, uint32_t* bits);
// *count += positions without a row.
void CountNoRow(Stream stream, const uint32_t* rows, Count num_rows, unsigned long long* count);

void ReadSeen(Stream stream, const TableRef& table, const DeviceRecord* records,
              const FilterRef& filter, const uint64_t* keys, int64_t num_keys, uint8_t* present,
              int64_t* frequencies, int64_t* last_steps);
// Writes scores where last[i]; *num_present += positions whose key has a row.
void WriteScores(Stream stream, DeviceRecord* records, const uint32_t* rows, const uint8_t* last,
                 const int64_t* scores, int64_t num_keys, uint32_t* num_present);

void GatherKeys(Stream stream, const DeviceRecord* records, const uint32_t* rows, int64_t num_rows,
                uint64_t* keys);
void GatherRecords(Stream stream, const DeviceRecord* records, const uint32_t* rows,
                   int64_t num_rows, DeviceRecord* out);
// The records of rows, from [num_rows, 3]: frequency, last step, score.
void WriteRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                  const int64_t* values, bool with_scores, int64_t num_rows);

// What Evict removes: rows whose keys have outlived `steps_to_live`, or whose half sum of squares
// is below the threshold (negative: none). Rows must owe nothing. `rows` and `scratch` [num_rows];
// num_rows and num_scratch (scalars) must be 0.
void ListEvictable(Stream stream, const TableRef& table, const DeviceRecord* records,
                   Count all_rows, int64_t step, int64_t steps_to_live, float l2_threshold,
                   uint32_t* rows, uint32_t* num_rows, uint32_t* scratch, uint32_t* num_scratch);
// Of waiting keys and their rows in the filter those that have outlived their time. *num_outlived
// must be 0.
void ListOutlivedWaiting(Stream stream, const TableRef& waiting, const uint64_t* keys,
                         const uint32_t* rows, int64_t num_keys, int64_t step,
                         int64_t steps_to_live, uint64_t* outlived, uint32_t* num_outlived);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_RECORD_KERNELS_CUH_
