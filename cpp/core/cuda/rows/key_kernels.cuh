// Whole batches on the index: launches of the probes in probe.h. Everything here is async.
#ifndef SOK_CORE_CUDA_ROWS_KEY_KERNELS_CUH_
#define SOK_CORE_CUDA_ROWS_KEY_KERNELS_CUH_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/rows/table_ref.h"

namespace sok {
namespace cuda {

// rows[i]: row number of keys[i], or kNoRow.
struct FindKeysBatch {
  TableRef table;
  const uint64_t* keys;
  Count num_keys;
  uint32_t* rows;  // [num_keys]
};
void FindKeys(Stream stream, const std::vector<FindKeysBatch>& batches);

// Inserts missing keys, with initial rows and slot rows, and updates the counters. The caller has
// made room in index and arena. `inserted` may be null. The new counters are also written to
// `host_counters`, pinned host memory, unless it is null.
struct InsertBatch {
  TableRef table;
  const uint64_t* keys;
  Count num_keys;
  uint32_t* rows;  // [num_keys]
  uint8_t* inserted = nullptr;
  Counters* host_counters = nullptr;
};
// For different tables, in two launches together.
void InsertKeys(Stream stream, const std::vector<InsertBatch>& batches);

// Puts the row numbers of erased keys on the free stack, which has room for all row numbers.
void EraseKeys(Stream stream, const TableRef& table, const uint64_t* keys, int64_t num_keys);

// Copies all keys to an empty index, without erased slots.
void Rehash(Stream stream, const IndexRef& from, const IndexRef& to, Counters* counters);

// Lists all keys and their row numbers, in no particular order. *cursor must be 0.
void ListKeys(Stream stream, const IndexRef& index, uint64_t* keys, uint32_t* rows,
              uint32_t* cursor);

// Buckets visited to find present keys: the sum over all keys, and the most for one.
struct ProbeLengths {
  unsigned long long total;  // NOLINT: what CUDA's atomics take
  unsigned long long most;   // NOLINT
};
// Adds to *lengths, in device memory.
void AddProbeLengths(Stream stream, const IndexRef& index, ProbeLengths* lengths);

// How many positions of a batch have a missing key, and the table's present counters.
struct MissBatch {
  TableRef table;
  const uint64_t* keys;
  Count num_keys;
};
struct Misses {
  uint32_t num_missing;
  Counters counters;
};
// For different tables, in two launches together. Writes `misses` [batches], in device memory.
void CountMisses(Stream stream, const std::vector<MissBatch>& batches, Misses* misses);

// Counts the positions with kNoRow that are the first of their key, as `first[i]` says.
void CountMissing(Stream stream, const uint32_t* rows, const uint8_t* first, int64_t num_keys,
                  uint32_t* count);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_KEY_KERNELS_CUH_
