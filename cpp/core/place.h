// Place: which rank holds a row of a dense table, and at which local row.
//
//     row-wise      ids 0 1 2 3 | 4 5 6 | 7 8 9      10 rows on 3 ranks: the first ranks
//                   owner     0       1       2      take one more
//     whole table   ids 0 ..................... 9    one owner; the table may follow others of the
//                   local rows row_offset ..         same width there
//
//     key = local_row * world_size + owner
//
// Keys are routed to rank key % world_size, which is the owner of the row. The owner finds the
// local row as key / world_size.
//
// A key of a hash table needs no placement: its owner is key % world_size, and it is sent
// unchanged.
//
// Invariant: different ids in [0, num_rows) have different keys.
#ifndef SOK_CORE_PLACE_H_
#define SOK_CORE_PLACE_H_

#include <cstdint>

#include "cpp/core/platform.h"

namespace sok {

inline constexpr int64_t kAllRanks = -1;  // in place of an owner: rows spread evenly over all ranks
inline constexpr int64_t kByKey = -2;     // no dense table: the keys of a hash table

struct RowPlacement {
  int64_t num_rows = 0;       // of the whole table
  int64_t owner = kAllRanks;  // of all rows
  int64_t row_offset = 0;     // first row at the owner
};

// The key of an id in [0, num_rows).
SOK_HD inline uint64_t PlaceRow(const RowPlacement& placement, int64_t world_size, int64_t id) {
  if (placement.owner >= 0) {
    return static_cast<uint64_t>((id + placement.row_offset) * world_size + placement.owner);
  }
  const int64_t rows = placement.num_rows / world_size, longer = placement.num_rows % world_size;
  const int64_t in_longer = longer * (rows + 1);
  // If rows is 0, all ids are in the longer shards: the divisor 1 only avoids a division by 0.
  const int64_t owner =
      id < in_longer ? id / (rows + 1) : longer + (id - in_longer) / (rows > 0 ? rows : 1);
  const int64_t start = owner * rows + (owner < longer ? owner : longer);
  return static_cast<uint64_t>((id - start + placement.row_offset) * world_size + owner);
}

}  // namespace sok

#endif  // SOK_CORE_PLACE_H_
