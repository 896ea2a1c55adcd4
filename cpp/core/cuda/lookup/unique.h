// Unique keys with inverse, and their partition by owner, on the device.
//
// A hash table of positions, at least twice as large as the batch: a slot holds the position of a
// key. Keys are input, so they are never copied, compared with a sentinel or published.
//
//     keys     k0 k1 k2 k1 k0         slots   . 1 . 0 2 .      equal keys meet in one slot, where
//     slot_of   3  1  4  1  3                                  the least position stays (atomicMin)
//     is first  1  1  1  0  0         scan    0 1 2            -> rank of each unique key
//     inverse   0  1  2  1  0
//
// Invariant: unique keys are in the order of their first occurrence, whatever order the threads ran
// in. (The CPU's order differs: by owner, then hash.) With owners: by owner, then that order. A scan
// gives it as well: of how many first positions each owner has in each block of positions.
//
// Batches of many tables share their launches (jobs.cuh) and one scan; each has the result that it
// would have alone.
//
// All async: the number of unique keys stays on the device.
#ifndef SOK_CORE_CUDA_LOOKUP_UNIQUE_H_
#define SOK_CORE_CUDA_LOOKUP_UNIQUE_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/place.h"

namespace sok {
namespace cuda {

// Slots of a batch.
int64_t NumSlots(int64_t num_keys);

// One table's keys. Pointers are to device memory.
struct UniqueBatch {
  const uint64_t* keys;
  int64_t num_keys;
  uint64_t* unique;      // [num_keys], filled up to *num_unique
  int32_t* inverse;      // [num_keys]
  uint32_t* num_unique;  // a scalar
};
// `slots`: as many as NumSlots of all batches together, of which all bits have been set by a launch
// that sets others too. Null: they are taken and set here.
// Throws std::invalid_argument for 2^30 keys or more in a batch, or 2^31 in all.
void Unique(Stream stream, Workspace& workspace, const std::vector<UniqueBatch>& batches,
            uint32_t* slots = nullptr);

// Owner-major. owner_offsets [world_size + 1] into the unique keys; the last is their number.
struct UniqueByOwnerBatch {
  const uint64_t* keys;
  int64_t num_keys;
  uint64_t* unique;        // [num_keys], filled up to the last of owner_offsets
  int32_t* inverse;        // [num_keys]
  int64_t* owner_offsets;  // [world_size + 1]
};
// Words that must be ones before: as `slots` of Unique.
int64_t NumOnesByOwner(int64_t num_keys, int64_t world_size);

// Throws as Unique does, and for a world_size that is not in [1, 2^24], or if world_size times the
// batches' blocks of 256 keys is 2^31 or more.
void UniqueByOwner(Stream stream, Workspace& workspace,
                   const std::vector<UniqueByOwnerBatch>& batches, int64_t world_size,
                   uint32_t* ones = nullptr);

// chosen[i] = 1 at the first (or last) position of each key, else 0.
enum class Occurrence { kFirst, kLast };
void ChooseOccurrence(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
                      Occurrence occurrence, uint8_t* chosen);  // [num_keys]

// PlaceRow (core/place.h) for batches: the keys of dense tables, for UniqueByOwner.
// Async. An id outside [0, num_rows) gets an arbitrary key; CheckBatches finds it.
struct PlaceBatch {
  RowPlacement placement;
  const int64_t* ids;  // [num_keys]
  int64_t num_keys;
  uint64_t* keys;  // [num_keys]
};
void PlaceRows(Stream stream, int64_t world_size, const std::vector<PlaceBatch>& batches);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_UNIQUE_H_
