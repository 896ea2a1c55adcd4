// Entries of a SparseTensor [batch, columns] as samples: keys one behind the other, and row splits.
//
//     indices     (0,0) (0,1) (2,0)          in order: by row, then by column
//     row_splits  0 2 2 3
//
// Entries come in any order. Mostly it is the right one; that is found out by reading the indices
// once, and then nothing but the row splits is written.
#ifndef SOK_CORE_CPU_SPARSE_SAMPLES_H_
#define SOK_CORE_CPU_SPARSE_SAMPLES_H_

#include <cstdint>
#include <vector>

#include "cpp/core/parallel.h"

namespace sok {

// Entries at `indices` [num_entries, 2] with `batch` rows. Writes row_splits [batch + 1]: entry k of
// a sample is at or after its split. Entries outside of the rows are left out of all samples, so that
// row_splits does not lead from 0 to num_entries, which CheckBatch refuses.
//
// Returns the entries in order (equal ones stay as they come), empty where they already are.
std::vector<int64_t> SparseSamples(Executor& ex, const int64_t* indices, int64_t num_entries,
                                   int64_t batch, int64_t* row_splits);

}  // namespace sok

#endif  // SOK_CORE_CPU_SPARSE_SAMPLES_H_
