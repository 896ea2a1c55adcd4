// Positions of batches sorted by the row that they read, for the sums of combine.h.
//
//     inverse    0 1 0 2 | 1 0              two batches, of 3 and 2 unique rows
//     row        0 1 0 2 | 4 3              rows count over all batches
//     sorted     0 0 1 2 | 3 4              one stable sort leaves each batch in its place
//     position   0 2 1 3 | 1 0              positions count within their batch
#ifndef SOK_CORE_CUDA_LOOKUP_SORTED_POSITIONS_CUH_
#define SOK_CORE_CUDA_LOOKUP_SORTED_POSITIONS_CUH_

#include <cstdint>
#include <vector>

#include "cpp/core/combiner.h"
#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// The share that position k takes of the gradient of its sample. Null pointers: sample k, share 1.
struct Shares {
  int32_t* sample = nullptr;  // [num_keys]
  float* factor = nullptr;    // [num_keys]
};

struct SortedPositions {
  const uint32_t* rows;       // [num_keys], ascending
  const uint32_t* positions;  // [num_keys]
  int64_t num_keys;
  uint32_t first_row;  // number of the batch's row 0
  int64_t tile;        // positions in a tile
  bool skips_zeros;    // a share of 0 passes nothing, not even an infinite gradient

  int64_t num_tiles() const { return (num_keys + tile - 1) / tile; }
};

// What sums need of a batch besides its gradients and rows.
struct PositionBatch {
  const Samples* samples;
  int64_t num_unique;
  int64_t dim;
};

// Positions by the row that they read, and their shares.
struct SortedBatch {
  SortedPositions positions;
  Shares shares;
};

// Positions in a tile. Long enough that few partial sums are left, short enough that there are tiles
// for all threads of a device: a thread takes 16 bytes of a tile's rows. Depends only on the shape
// of the batch.
int64_t TileOf(int64_t num_keys, int64_t dim);

// Async. Scratch comes from the workspace.
std::vector<SortedBatch> SortPositions(Stream stream, Workspace& workspace,
                                       const std::vector<PositionBatch>& sources);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_SORTED_POSITIONS_CUH_
