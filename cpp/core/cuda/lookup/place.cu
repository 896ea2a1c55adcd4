#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/lookup/place.h"

namespace sok {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    PlaceKernel(RowPlacement placement, int64_t world_size, const int64_t* ids, int64_t num_keys,
                uint64_t* keys) {
  const int64_t i = GlobalThread();
  if (i < num_keys) keys[i] = PlaceRow(placement, world_size, ids[i]);
}

}  // namespace

void PlaceRows(Stream stream, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys) {
  Launch(PlaceKernel, num_keys, stream, placement, world_size, ids, num_keys, keys);
}

}  // namespace cuda
}  // namespace sok
