// Place: which rank holds a row of a dense table, and where there.
//
//     row-wise      ids 0 1 2 3 | 4 5 6 | 7 8 9      10 rows on 3 ranks, the first ones take one
//     more
//                   owner     0       1       2
//     whole table   ids 0 ..................... 9    one owner; there it may stand behind other
//                   rows of its own: row_offset ..   tables of the same width
//
//     key = local_row * world_size + owner
//
// so that the routing of keys, which sends key % world_size its way, takes a row to its owner and
// the owner finds its local row as key / world_size.
//
// Keys of a hash table have their place in themselves: the owner is key % world_size, and the whole
// key goes there.
//
// Invariant: for ids in [0, num_rows) the keys differ where the ids do.
#ifndef SOK_CORE_CPU_PLACE_H_
#define SOK_CORE_CPU_PLACE_H_

#include <cstdint>

#include "cpp/core/parallel.h"

namespace sok {

inline constexpr int64_t kAllRanks = -1;  // in place of an owner: rows laid evenly over all ranks
inline constexpr int64_t kByKey = -2;     // no dense table: the keys of a hash table

struct RowPlacement {
  int64_t num_rows = 0;       // of the whole table
  int64_t owner = kAllRanks;  // of all rows
  int64_t row_offset = 0;     // first row at the owner
};

// Ids must be in [0, num_rows); CheckBatch says which is not.
void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys);  // both [num_keys]

}  // namespace sok

#endif  // SOK_CORE_CPU_PLACE_H_
