// Combine: rows of one sample reduced to one, and the gradient of that.
//
// The keys of a batch arrive flat, cut into samples by `row_splits`; `inverse` says which unique
// row each key reads. Rows are given by pointer: they lie wherever the table keeps them, mostly in
// DRAM, so a row is prefetched some keys before it is read.
//
//     inverse     3 0 | 1 3 7 |    | 2          keys of sample 0 | 1 | 2 (empty) | 3
//     row_splits  0     2       5    5    6
//     out         r3+r0 r1+r3+r7 0   r2
//
// Invariant: a sum runs in order of position, whichever thread does it, so results are bit-equal
// for any number of threads. The gradient gives each thread a range of unique rows: it visits all
// positions, keeps those that fall into its range, and adds their gradients; nothing is shared.
//
// Infinities and NaNs pass through unchecked. `inverse` must lie in [0, num_unique), row_splits
// must ascend from 0 to num_keys: neither is checked here.
#ifndef SOK_CORE_CPU_COMBINE_H_
#define SOK_CORE_CPU_COMBINE_H_

#include <cstdint>

#include "cpp/core/combiner.h"
#include "cpp/core/parallel.h"

namespace sok {

// Samples of one key each and without weights are that key's row, whatever the combiner: then the
// same samples with the combiner kNone, whose rows are copied.
Samples Simplified(Executor& ex, Samples samples);

// rows[u] points at the row of unique key u (dim floats), or of key u where there is no `inverse`.
void CombineRows(Executor& ex, const Samples& samples, const float* const* rows, int64_t num_unique,
                 int64_t dim, float* out);  // [batch, dim] or [num_keys, dim]

// Gradient by unique key: out[u] = sum over positions k with inverse[k] == u, in order of k.
// Bit-equal for any number of threads.
void CombineGradient(Executor& ex, const Samples& samples, const float* grad, int64_t num_unique,
                     int64_t dim, float* out);  // [num_unique, dim], overwritten
// The same, added to what `out` holds.
void AddGradient(Executor& ex, const Samples& samples, const float* grad, int64_t num_unique,
                 int64_t dim, float* out);

// d loss / d weights. [num_keys] Without an `inverse`, key k reads row k.
void WeightGradient(Executor& ex, const Samples& samples, const float* const* rows,
                    const float* grad, int64_t dim, float* out);

}  // namespace sok

#endif  // SOK_CORE_CPU_COMBINE_H_
