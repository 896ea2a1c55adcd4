// Route: unique keys with inverse, grouped by owner.
//
// A batch of keys is cut into partitions by owner first and by hash bits within an owner, so that
// the small hash table of one partition stays in the L1 cache:
//
//     keys        k0 k1 k2 | k3 k4 k5 | ...           cut into fixed chunks
//       histogram of partitions per chunk, prefix sum, stable scatter
//     scattered   partition 0        | partition 1     | ...    (owner-major)
//       one open-addressing table per partition: local ids in order of first occurrence
//     unique      u0 u1 .            | u0 .            | ...    compacted in place
//     local_ids   0 0 1 0            | 0 0             | ...    same places as `scattered`
//       the scatter walked once more, backwards: inverse[i] = first id of partition + local id
//
// No position is stored with a key: the histogram tells where the scatter put it, and no two
// threads ever write to one cache line of `inverse` at a time, as they would if each partition
// wrote its own positions.
//
// Invariant: chunks and partitions depend on num_keys and world_size alone, and the scatter is
// stable, so the order is a pure function of the keys: owner, then hash, then first occurrence.
//
// Cost: four passes over the batch, about 5 ns a key on one thread; 16 bytes of scratch a key.
#ifndef SOK_CORE_CPU_ROUTE_H_
#define SOK_CORE_CPU_ROUTE_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/parallel.h"
#include "cpp/core/place.h"

namespace sok {

// Unique keys of one table's batch, grouped by owner rank (key % world_size over uint64).
// Within an owner the order is a pure function of the keys (any thread count gives the same).
class Route {
 public:
  // Writes inverse[i] = position of keys[i] among the unique keys (owner-major).
  // Throws std::invalid_argument for a negative or too large num_keys (2^31 and up: positions are
  // int32) and for world_size < 1.
  Route(Executor& ex, const uint64_t* keys, int64_t num_keys, int64_t world_size,
        int32_t* inverse);  // [num_keys]

  int64_t num_unique() const { return unique_offsets_.back(); }
  // [world_size + 1] into the unique keys
  const std::vector<int64_t>& owner_offsets() const { return owner_offsets_; }
  void WriteUnique(Executor& ex, uint64_t* unique) const;  // [num_unique]

 private:
  void RunSerial(const uint64_t* keys, int64_t world_size, int32_t* inverse);
  void RunPartitioned(Executor& ex, const uint64_t* keys, int64_t world_size, int32_t* inverse);

  const int64_t num_keys_;
  int64_t num_partitions_ = 1;
  Scratch<uint64_t> scattered_;             // [num_keys] partition by partition, unique keys first
  std::vector<int64_t> partition_offsets_;  // [num_partitions + 1] into `scattered_`
  std::vector<int64_t> unique_offsets_;     // [num_partitions + 1] into the unique keys
  std::vector<int64_t> owner_offsets_;      // [world_size + 1]
};

// The unique keys of a batch by themselves: writes the first num_unique of unique [num_keys], in
// the order of a Route for one owner, and inverse [num_keys]; returns num_unique.
int64_t UniqueKeys(Executor& ex, const uint64_t* keys, int64_t num_keys, uint64_t* unique,
                   int32_t* inverse);

// PlaceRow for a batch: the keys of a dense table, which are routed like any others.
// Ids must be in [0, num_rows); CheckBatch names one that is not.
void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys);  // both [num_keys]

}  // namespace sok

#endif  // SOK_CORE_CPU_ROUTE_H_
