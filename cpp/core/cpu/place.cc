#include "cpp/core/cpu/place.h"

namespace sok {

void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys) {
  constexpr int64_t kGrain = 1 << 14;
  if (placement.owner >= 0) {
    ex.ParallelFor(num_keys, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        keys[k] = (ids[k] + placement.row_offset) * world_size + placement.owner;
      }
    });
    return;
  }
  const int64_t rows = placement.num_rows / world_size, longer = placement.num_rows % world_size;
  const int64_t in_longer = longer * (rows + 1);
  ex.ParallelFor(num_keys, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t id = ids[k];
      // Past the longer shards there are none at all where rows is 0, so no id gets there.
      const int64_t owner =
          id < in_longer ? id / (rows + 1) : longer + (id - in_longer) / (rows > 0 ? rows : 1);
      const int64_t start = owner * rows + (owner < longer ? owner : longer);
      keys[k] = (id - start + placement.row_offset) * world_size + owner;
    }
  });
}

}  // namespace sok
