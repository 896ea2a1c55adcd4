// Places of a batch of rows on the device: core/place.h, one thread per id.
#ifndef SOK_CORE_CUDA_LOOKUP_PLACE_H_
#define SOK_CORE_CUDA_LOOKUP_PLACE_H_

#include <cstdint>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/place.h"

namespace sok {
namespace cuda {

// Async. An id outside [0, num_rows) gets some key; CheckBatch says which it is.
void PlaceRows(Stream stream, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys);  // both [num_keys]

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_PLACE_H_
