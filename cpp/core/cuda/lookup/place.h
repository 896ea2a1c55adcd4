// PlaceRow (core/place.h) for a batch on the device, one thread per id.
#ifndef SOK_CORE_CUDA_LOOKUP_PLACE_H_
#define SOK_CORE_CUDA_LOOKUP_PLACE_H_

#include <cstdint>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/place.h"

namespace sok {
namespace cuda {

// Async. An id outside [0, num_rows) gets an arbitrary key; CheckBatches finds it.
void PlaceRows(Stream stream, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys);  // both [num_keys]

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_PLACE_H_
