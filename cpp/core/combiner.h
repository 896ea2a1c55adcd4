// Samples of a batch, and how a combiner reduces the rows of each to one. Shared by all devices.
#ifndef SOK_CORE_COMBINER_H_
#define SOK_CORE_COMBINER_H_

#include <cmath>
#include <cstdint>
#include <string>

#include "cpp/core/platform.h"

namespace sok {

enum class Combiner { kNone, kSum, kMean, kSqrtn };
Combiner ParseCombiner(const std::string& name);  // "none", "sum", "mean", "sqrtn"; any case

// One table's flat keys as samples. kNone has no samples: out is [num_keys, dim], each key's row
// times its weight.
struct Samples {
  // [num_keys] into the unique rows. Null for CombineRows: key k reads row k.
  const int32_t* inverse = nullptr;
  int64_t num_keys = 0;
  const int64_t* row_splits = nullptr;  // [batch + 1]; null when combiner is kNone
  int64_t batch = 0;
  const float* weights = nullptr;  // [num_keys] or null (all ones)
  Combiner combiner = Combiner::kSum;
  // sum: sum(w v); mean: sum(w v) / sum(w); sqrtn: sum(w v) / sqrt(sum(w^2)).
  // An empty sample, or one whose divisor is 0, is all zeros (and passes no gradient).

  // With kNone each key is a sample: positions [Begin(s), End(s)) are those of sample s.
  SOK_HD int64_t num_samples() const { return combiner == Combiner::kNone ? num_keys : batch; }
  SOK_HD int64_t Begin(int64_t s) const { return combiner == Combiner::kNone ? s : row_splits[s]; }
  SOK_HD int64_t End(int64_t s) const { return Begin(s + 1); }
};

// The divisor of the sum over the sample of positions [begin, end); 0 for an empty sample.
SOK_HD inline float SampleDivisor(const Samples& samples, int64_t begin, int64_t end) {
  if (samples.combiner == Combiner::kSum) return begin < end ? 1.0f : 0.0f;
  const bool mean = samples.combiner == Combiner::kMean;
  double sum = static_cast<double>(end - begin);
  if (samples.weights != nullptr) {
    sum = 0.0;
    for (int64_t k = begin; k < end; ++k) {
      const double weight = samples.weights[k];
      sum += mean ? weight : weight * weight;
    }
  }
  return static_cast<float>(mean ? sum : std::sqrt(sum));
}

}  // namespace sok

#endif  // SOK_CORE_COMBINER_H_
