// Sorting and scanning by CUB. In one file, because CUB's templates take long to compile.
// All async; scratch comes from the workspace.
#ifndef SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_
#define SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_

#include <cstdint>

#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// Bits that numbers below `end` need, at least 1.
int BitsBelow(int64_t end);

// values[i] = sum of values[0 .. i - 1]. At most 2^31 - 1 of them, here and below.
void ExclusiveSum(Stream stream, Workspace& workspace, uint32_t* values, int64_t count);

// Stable sort by the lowest `num_bits` bits of the keys, with their values.
void SortPairs(Stream stream, Workspace& workspace, const uint32_t* keys, uint32_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits);
void SortPairs(Stream stream, Workspace& workspace, const uint64_t* keys, uint64_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_PRIMITIVES_H_
