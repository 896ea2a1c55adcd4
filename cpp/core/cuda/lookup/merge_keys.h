// Keys that several ranks sent, made unique, with their positions sorted by unique key. No sort: a
// rank sends a key once, so one bit per rank says who sent it, and how many positions come before.
//
//     position    0 1 2 | 3 4 | 5         three ranks
//     key         a b c | b d | b
//     ranks       a 1..   b 111   c 1..   d .1.      a mask at each key's first position
//     first place a 0     b 1     c 4     d 5        bits of all earlier masks
//     place       0 1 4 | 2 5 | 3                    first place + bits of lower ranks
//
// Invariant: the order is that of Unique and SortPositions: of first occurrence, then of position.
#ifndef SOK_CORE_CUDA_LOOKUP_MERGE_KEYS_H_
#define SOK_CORE_CUDA_LOOKUP_MERGE_KEYS_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// One table's keys. Pointers are to device memory.
struct MergeBatch {
  const uint64_t* keys;  // [num_keys], one rank's after the other's
  int64_t num_keys;
  const uint32_t* begins;  // [world_size] the first of each rank
  uint64_t* unique;        // [num_keys], filled up to the number of unique keys
};

struct MergedKeys {
  std::vector<int64_t> num_unique;  // of each batch
  // In memory of the workspace: of all batches, one after the other, as in sorted_positions.cuh.
  const uint32_t* rows;       // unique keys count over all batches
  const uint32_t* positions;  // these count within their batch
};

// Waits. Throws std::invalid_argument as Unique does, and if a rank sent a key twice.
MergedKeys MergeKeys(Stream stream, Workspace& workspace, const std::vector<MergeBatch>& batches,
                     int64_t world_size);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_MERGE_KEYS_H_
