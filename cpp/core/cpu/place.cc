#include "cpp/core/cpu/place.h"

namespace sok {

void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys) {
  constexpr int64_t kGrain = 1 << 14;
  ex.ParallelFor(num_keys, kGrain, [=](int64_t begin, int64_t end) {
    const RowPlacement mine = placement;  // a local copy, which `keys` cannot alias
    for (int64_t k = begin; k < end; ++k) keys[k] = PlaceRow(mine, world_size, ids[k]);
  });
}

}  // namespace sok
