// Entries of a SparseTensor [batch, columns] as samples: flat keys and row splits.
//
//     indices     (0,0) (0,1) (2,0)          in order: by row, then by column
//     row_splits  0 2 2 3
//
// Entries may come in any order, but are usually in order already. One pass over the indices finds
// that out; then only the row splits are written.
#ifndef SOK_CORE_CPU_SPARSE_SAMPLES_H_
#define SOK_CORE_CPU_SPARSE_SAMPLES_H_

#include <cstdint>
#include <vector>

#include "cpp/core/parallel.h"

namespace sok {

// `indices` [num_entries, 2] of entries in `batch` rows. Writes row_splits [batch + 1]. Entries
// outside of the rows belong to no sample; row_splits then does not lead from 0 to num_entries,
// which CheckBatch refuses.
//
// Returns the positions of the entries in order (stable); empty if they are in order already.
std::vector<int64_t> SparseSamples(Executor& ex, const int64_t* indices, int64_t num_entries,
                                   int64_t batch, int64_t* row_splits);

}  // namespace sok

#endif  // SOK_CORE_CPU_SPARSE_SAMPLES_H_
