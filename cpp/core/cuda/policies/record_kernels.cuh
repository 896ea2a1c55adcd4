// Kernels for policies: whole batches on the records of a table. Everything here is async.
//
// Names: `unique` are distinct keys, `rows` are row numbers, kNoRow if there is none.
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
  uint32_t admitted;  // get a row
  uint32_t refused;   // stay waiting
  uint32_t counted;   // of them, those not yet counted in this step
};

// The classified keys of a call, in device memory, in no particular order.
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
  const int32_t* inverse = nullptr;  // [num_keys]; null if the keys were distinct already
  uint32_t* num_unique = nullptr;    // a scalar; null if all num_keys are distinct
  ClassifiedKeys classified;
  uint32_t* new_rows = nullptr;      // [num_keys], of those admitted
  uint32_t* waiting_rows = nullptr;  // [num_keys], of those refused, in the exact filter
  BatchCounts counts = {};           // on the host

  Count distinct() const { return Count(num_keys, num_unique); }
};

// Classifies the keys of a lookup that will be `step`. Changes only `out`.
void ClassifyKeys(Stream stream, const TableRef& table, const DeviceRecord* records,
                  const FilterRef& filter, const uint64_t* unique, Count num_unique, int64_t step,
                  const ClassifiedKeys& out);

// Writes records of keys that got rows. Null frequencies: 0, for keys written and not looked up.
void AddRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                const int64_t* frequencies, int64_t num_keys, int64_t step);
// Counts a lookup in `step` in the records of rows, once per step.
void CountRows(Stream stream, DeviceRecord* records, const uint32_t* rows, Count num_rows,
               int64_t step);
// The same for waiting keys, by their rows in the exact filter or by their counters.
void CountWaiting(Stream stream, const TableRef& waiting, const uint32_t* rows, int64_t num_rows,
                  int64_t step);
void CountInBloom(Stream stream, const FilterRef& filter, const uint64_t* unique, int64_t num_keys);
// Rows lose their keys. Row numbers may repeat.
void RemoveRecords(Stream stream, DeviceRecord* records, const uint32_t* rows, int64_t num_rows);

// inserted[i] = 1 if this call gave the key its row and first[i] is set.
void FlagInserted(Stream stream, const KeyBatch& batch, const uint32_t* rows_now,
                  const uint8_t* first, uint8_t* inserted);
// Sets the bits of rows. `bits` [rows / 32 + 1]
void MarkRows(Stream stream, const uint32_t* rows, Count num_rows, uint32_t* bits);
// *count += positions without a row.
void CountNoRow(Stream stream, const uint32_t* rows, Count num_rows, unsigned long long* count);

void ReadSeen(Stream stream, const TableRef& table, const DeviceRecord* records,
              const FilterRef& filter, const uint64_t* keys, int64_t num_keys, uint8_t* present,
              int64_t* frequencies, int64_t* last_steps);
// Writes scores if last[i] is set; *num_present += positions whose key has a row.
void WriteScores(Stream stream, DeviceRecord* records, const uint32_t* rows, const uint8_t* last,
                 const int64_t* scores, int64_t num_keys, uint32_t* num_present);

void GatherKeys(Stream stream, const DeviceRecord* records, const uint32_t* rows, int64_t num_rows,
                uint64_t* keys);
void GatherRecords(Stream stream, const DeviceRecord* records, const uint32_t* rows,
                   int64_t num_rows, DeviceRecord* out);
// Writes records of rows from `values` [num_rows, 3]: frequency, last step, score.
void WriteRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                  const int64_t* values, bool with_scores, int64_t num_rows);

// Lists what Evict removes: rows whose keys have outlived `steps_to_live`, or whose half sum of
// squares is below the threshold (negative: none). Rows must owe nothing. `rows` and `scratch`
// [num_rows]; num_rows and num_scratch (scalars) must be 0.
void ListEvictable(Stream stream, const TableRef& table, const DeviceRecord* records,
                   Count all_rows, int64_t step, int64_t steps_to_live, float l2_threshold,
                   uint32_t* rows, uint32_t* num_rows, uint32_t* scratch, uint32_t* num_scratch);
// Lists those of the waiting `keys`, in `rows` of the filter, that have outlived `steps_to_live`.
// *num_outlived must be 0.
void ListOutlivedWaiting(Stream stream, const TableRef& waiting, const uint64_t* keys,
                         const uint32_t* rows, int64_t num_keys, int64_t step,
                         int64_t steps_to_live, uint64_t* outlived, uint32_t* num_outlived);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_RECORD_KERNELS_CUH_
