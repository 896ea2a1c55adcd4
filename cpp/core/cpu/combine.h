// Combine: rows of one sample reduced to one, and the gradient of that.   (interface)
#ifndef SOK_CORE_CPU_COMBINE_H_
#define SOK_CORE_CPU_COMBINE_H_

#include <cstdint>
#include <string>

#include "cpp/core/parallel.h"

namespace sok {

enum class Combiner { kNone, kSum, kMean, kSqrtn };
Combiner ParseCombiner(const std::string& name);  // "none", "sum", "mean", "sqrtn"; any case

// One table's flat keys as samples. kNone has no samples: out is [num_keys, dim].
struct Samples {
  const int32_t* inverse = nullptr;  // [num_keys] into the unique rows
  int64_t num_keys = 0;
  const int64_t* row_splits = nullptr;  // [batch + 1]; null when combiner is kNone
  int64_t batch = 0;
  const float* weights = nullptr;  // [num_keys] or null (all ones)
  Combiner combiner = Combiner::kSum;
  // sum: sum(w v); mean: sum(w v) / sum(w); sqrtn: sum(w v) / sqrt(sum(w^2)).
  // An empty sample, or one whose divisor is 0, is all zeros (and passes no gradient).
};

// rows[u] points at the row of unique key u (dim floats).
void CombineRows(Executor& ex, const Samples& samples, const float* const* rows, int64_t num_unique,
                 int64_t dim, float* out);  // [batch, dim] or [num_keys, dim]

// Gradient by unique key: out[u] = sum over positions k with inverse[k] == u, in order of k.
// Bit-equal for any number of threads.
void CombineGradient(Executor& ex, const Samples& samples, const float* grad, int64_t num_unique,
                     int64_t dim, float* out);  // [num_unique, dim], overwritten

// d loss / d weights. [num_keys]
void WeightGradient(Executor& ex, const Samples& samples, const float* const* rows,
                    const float* grad, int64_t dim, float* out);

}  // namespace sok

#endif  // SOK_CORE_CPU_COMBINE_H_
