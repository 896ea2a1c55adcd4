// PlaceRow (core/place.h) for a batch, on all threads.
#ifndef SOK_CORE_CPU_PLACE_H_
#define SOK_CORE_CPU_PLACE_H_

#include <cstdint>

#include "cpp/core/parallel.h"
#include "cpp/core/place.h"

namespace sok {

// Ids must be in [0, num_rows); CheckBatch names one that is not.
void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys);  // both [num_keys]

}  // namespace sok

#endif  // SOK_CORE_CPU_PLACE_H_
