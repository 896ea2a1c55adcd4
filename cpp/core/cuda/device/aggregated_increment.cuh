// Aggregated increments: one atomic operation gives many threads their places 0, 1, 2, ..., in any
// order.
#ifndef SOK_CORE_CUDA_DEVICE_AGGREGATED_INCREMENT_CUH_
#define SOK_CORE_CUDA_DEVICE_AGGREGATED_INCREMENT_CUH_

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"

namespace sok {
namespace cuda {

// Adds 1 to *counter for each thread that calls this together; every thread gets its own value.
SOK_DEVICE uint32_t AggregatedIncrement(uint32_t* counter) {
  const cooperative_groups::coalesced_group together = cooperative_groups::coalesced_threads();
  uint32_t first = 0;
  if (together.thread_rank() == 0) {
    first = atomicAdd(counter, static_cast<uint32_t>(together.size()));
  }
  return together.shfl(first, 0) + static_cast<uint32_t>(together.thread_rank());
}

// The same for a whole warp, all lanes of which must call it: for kernels with several counters,
// whose threads must not be taken for one group. A lane that does not count gets no valid place.
SOK_DEVICE uint32_t AggregatedIncrement(const cooperative_groups::thread_block_tile<kWarp>& warp,
                                        bool counts, uint32_t* counter) {
  const uint32_t counting = warp.ballot(counts);
  if (counting == 0) return 0;
  const uint32_t leader = SOK_CTZ(counting), lane = warp.thread_rank();
  uint32_t first = 0;
  if (lane == leader) first = atomicAdd(counter, SOK_POPC(counting));
  return warp.shfl(first, leader) + SOK_POPC(counting & ((1u << lane) - 1));
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_AGGREGATED_INCREMENT_CUH_
