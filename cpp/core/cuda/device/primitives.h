// Sorting and scanning by CUB. In one file, because CUB's templates take long to compile.
// All async; scratch comes from the workspace.
#ifndef SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_
#define SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_

#include <cstdint>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/platform.h"

namespace sok {
namespace cuda {

// Bits that numbers below `end` need, at least 1.
int BitsBelow(int64_t end);

// values[i] = sum of values[0 .. i - 1]. At most 2^31 - 1 of them, here and below.
void ExclusiveSum(Stream stream, Workspace& workspace, uint32_t* values, int64_t count);

// sums[i] = sum of values[0 .. i - 1] + i, where all bits of a value make -1.
void SumCounts(Stream stream, Workspace& workspace, const uint32_t* values, uint32_t* sums,
               int64_t count);

SOK_HD inline uint32_t BitsSet(uint64_t word) {
  return SOK_POPC(static_cast<uint32_t>(word)) + SOK_POPC(static_cast<uint32_t>(word >> 32));
}

// How many bits of a mask are 0, plus 2^32 if one is.
SOK_HD inline uint64_t CountOfMask(const uint64_t* mask, int64_t num_words) {
  uint32_t bits = 0;
  for (int64_t word = 0; word < num_words; ++word) bits += BitsSet(~mask[word]);
  return bits == 0 ? 0 : uint64_t{1} << 32 | bits;
}

// sums[i] = sum of CountOfMask over masks [num_masks, num_words] 0 .. i - 1.
void SumMasks(Stream stream, Workspace& workspace, const uint64_t* masks, int64_t num_words,
              int64_t num_masks, uint64_t* sums);

// Stable sort by the lowest `num_bits` bits of the keys, with their values.
void SortPairs(Stream stream, Workspace& workspace, const uint32_t* keys, uint32_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits);
void SortPairs(Stream stream, Workspace& workspace, const uint64_t* keys, uint64_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_
