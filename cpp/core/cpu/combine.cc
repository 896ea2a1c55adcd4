#include "cpp/core/cpu/combine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "cpp/core/cpu/row_ops.h"
#include "cpp/core/cpu/scratch.h"

namespace sok {
namespace {

constexpr int64_t kRowsAhead = 12;      // rows asked for before they are read
constexpr int64_t kPointersAhead = 32;  // and the pointers to them before that
constexpr int64_t kGrainFloats = 32768;
constexpr int64_t kSplitsGrain = 32768;
constexpr int64_t kScanBlock =
    2048;  // positions sorted out at a time, so that the lists stay in L1

int64_t Grain(int64_t floats_each) {
  return std::max<int64_t>(1, kGrainFloats / std::max<int64_t>(1, floats_each));
}

// The row that position k reads.
inline int64_t RowOf(const Samples& samples, int64_t k) {
  return samples.inverse == nullptr ? k : samples.inverse[k];
}

// Prefetches what position k + kRowsAhead will read.
inline void PrefetchAhead(const Samples& samples, const float* const* rows, int64_t k,
                          int64_t dim) {
  if (samples.inverse != nullptr && k + kPointersAhead < samples.num_keys) {
    __builtin_prefetch(rows + samples.inverse[k + kPointersAhead]);
  }
  if (k + kRowsAhead < samples.num_keys) {
    PrefetchRow<false>(rows[RowOf(samples, k + kRowsAhead)], dim);
  }
}

template <int64_t kDim>
void CombineRange(const Samples& samples, const float* const* rows, int64_t variable_dim,
                  int64_t first, int64_t last, float* out) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  const bool none = samples.combiner == Combiner::kNone;
  for (int64_t s = first; s < last; ++s) {
    const int64_t begin = samples.Begin(s), end = samples.End(s);
    float* const out_row = out + s * dim;
    if (end - begin == 1 && samples.weights == nullptr) {
      PrefetchAhead(samples, rows, begin, dim);
      std::memcpy(out_row, rows[RowOf(samples, begin)], dim * sizeof(float));
      continue;
    }
    const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
    if (divisor == 0.0f) {
      std::fill_n(out_row, dim, 0.0f);
      continue;
    }
    // A known width is summed in registers.
    float registers[kDim > 0 ? kDim : 1] = {};
    float* const sum = kDim > 0 ? registers : out_row;
    if (kDim == 0) std::fill_n(sum, dim, 0.0f);
    for (int64_t k = begin; k < end; ++k) {
      PrefetchAhead(samples, rows, k, dim);
      const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k];
      AddScaled<kDim>(rows[RowOf(samples, k)], weight, dim, sum);
    }
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) out_row[d] = sum[d] / divisor;
  }
}

// For each position, the sample whose gradient it takes and the factor it takes it with.
// `sample` is null when position k belongs to sample k, `factor` when all factors are 1.
struct PositionMap {
  Scratch<int32_t> sample;
  Scratch<float> factor;
};

PositionMap MapPositions(Executor& ex, const Samples& samples) {
  PositionMap map;
  const bool none = samples.combiner == Combiner::kNone;
  const bool scaled = samples.weights != nullptr || (!none && samples.combiner != Combiner::kSum);
  if (!none) map.sample = Scratch<int32_t>(samples.num_keys);
  if (scaled) map.factor = Scratch<float>(samples.num_keys);
  if (none && !scaled) return map;

  ex.ParallelFor(samples.num_samples(), 2048, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = samples.Begin(s), end = samples.End(s);
      if (map.sample)
        std::fill(map.sample.get() + begin, map.sample.get() + end, static_cast<int32_t>(s));
      if (!map.factor) continue;
      const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
      for (int64_t k = begin; k < end; ++k) {
        const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k];
        map.factor[k] = divisor == 0.0f ? 0.0f : weight / divisor;
      }
    }
  });
  return map;
}

// Adds into rows [first, last) of `out` the gradients of all positions that read them.
template <int64_t kDim>
void AddToRange(const Samples& samples, const PositionMap& map, const float* grad,
                int64_t variable_dim, int32_t first, int32_t last, float* out) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  const uint32_t num_rows = static_cast<uint32_t>(last - first);
  int32_t positions[kScanBlock + kRowsAhead];
  for (int64_t block = 0; block < samples.num_keys; block += kScanBlock) {
    const int64_t block_end = std::min(block + kScanBlock, samples.num_keys);
    int64_t count = 0;
    for (int64_t k = block; k < block_end; ++k) {
      positions[count] = static_cast<int32_t>(k);
      count += static_cast<uint32_t>(samples.inverse[k] - first) < num_rows;
    }
    // Past the end the last position is prefetched again: cheaper than a test in the loop.
    if (count == 0) continue;
    std::fill_n(positions + count, kRowsAhead, positions[count - 1]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t ahead = positions[i + kRowsAhead];
      PrefetchRow<true>(out + samples.inverse[ahead] * dim, dim);
      const int64_t k = positions[i];
      const int64_t s = map.sample ? map.sample[k] : k;
      const float factor = map.factor ? map.factor[k] : 1.0f;
      // A divisor of 0 passes no gradient, not even an infinite one.
      if (factor == 0.0f && samples.combiner != Combiner::kSum) continue;
      AddScaled<kDim>(grad + s * dim, factor, dim, out + samples.inverse[k] * dim);
    }
  }
}

// The same for all rows and by one thread: sample by sample, without lists of positions.
template <int64_t kDim>
void AddSamples(const Samples& samples, const float* grad, int64_t variable_dim, float* out) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  const bool none = samples.combiner == Combiner::kNone;
  const int64_t num_samples = samples.num_samples();
  const int64_t last = samples.num_keys - 1;
  for (int64_t s = 0; s < num_samples; ++s) {
    const int64_t begin = samples.Begin(s), end = samples.End(s);
    const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
    for (int64_t k = begin; k < end; ++k) {
      const int64_t ahead = std::min(k + kRowsAhead, last);
      PrefetchRow<true>(out + samples.inverse[ahead] * dim, dim);
      const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k];
      const float factor = divisor == 0.0f ? 0.0f : weight / divisor;
      if (factor == 0.0f && samples.combiner != Combiner::kSum) continue;
      AddScaled<kDim>(grad + s * dim, factor, dim, out + samples.inverse[k] * dim);
    }
  }
}

// Sum of products in eight interleaved partial sums, the same for any vector width.
double Dot(const float* a, const float* b, int64_t dim) {
  float partial[8] = {};
  int64_t d = 0;
  for (; d + 8 <= dim; d += 8) {
#pragma omp simd
    for (int64_t j = 0; j < 8; ++j) partial[j] += a[d + j] * b[d + j];
  }
  for (; d < dim; ++d) partial[d % 8] += a[d] * b[d];
  double sum = 0.0;
  for (float p : partial) sum += p;
  return sum;
}

// CombineGradient, or AddGradient if it `adds`.
void SumGradient(Executor& ex, const Samples& any_samples, const float* grad, int64_t num_unique,
                 int64_t dim, bool adds, float* out) {
  const Samples samples = Simplified(ex, any_samples);
  // Every part walks all positions, so there are no more parts than threads to run them. A row
  // belongs to one part: how many there are does not show in the sums.
  const int64_t work_parts = 1 + samples.num_keys * dim / kGrainFloats;
  const int64_t num_parts =
      std::min<int64_t>({ex.num_threads(), work_parts, std::max<int64_t>(1, num_unique)});
  if (num_parts == 1) {
    if (!adds) std::fill_n(out, num_unique * dim, 0.0f);
    return WithDim(dim, [&](auto constant) {
      AddSamples<decltype(constant)::value>(samples, grad, dim, out);
    });
  }
  const PositionMap map = MapPositions(ex, samples);
  WithDim(dim, [&](auto constant) {
    ex.ParallelFor(num_parts, 1, [&](int64_t first_part, int64_t last_part) {
      const int64_t first = num_unique * first_part / num_parts;
      const int64_t last = num_unique * last_part / num_parts;
      if (!adds) std::fill(out + first * dim, out + last * dim, 0.0f);
      AddToRange<decltype(constant)::value>(samples, map, grad, dim, first, last, out);
    });
  });
}

}  // namespace

Samples Simplified(Executor& ex, Samples samples) {
  if (samples.combiner == Combiner::kNone || samples.weights != nullptr ||
      samples.batch != samples.num_keys) {
    return samples;
  }
  std::atomic<bool> one_key_each{true};
  ex.ParallelFor(samples.batch + 1, kSplitsGrain, [&](int64_t first, int64_t last) {
    int64_t differing = 0;
    for (int64_t s = first; s < last; ++s) differing |= samples.row_splits[s] ^ s;
    if (differing != 0) one_key_each = false;
  });
  if (one_key_each) samples.combiner = Combiner::kNone;
  return samples;
}

void CombineRows(Executor& ex, const Samples& samples, const float* const* rows, int64_t num_unique,
                 int64_t dim, float* out) {
  const int64_t num_samples = samples.num_samples();
  const int64_t keys_each = num_samples == 0 ? 1 : 1 + samples.num_keys / num_samples;
  WithDim(dim, [&](auto constant) {
    ex.ParallelFor(num_samples, Grain(keys_each * dim), [&](int64_t first, int64_t last) {
      CombineRange<decltype(constant)::value>(samples, rows, dim, first, last, out);
    });
  });
}

void CombineGradient(Executor& ex, const Samples& samples, const float* grad, int64_t num_unique,
                     int64_t dim, float* out) {
  SumGradient(ex, samples, grad, num_unique, dim, /*adds=*/false, out);
}

void AddGradient(Executor& ex, const Samples& samples, const float* grad, int64_t num_unique,
                 int64_t dim, float* out) {
  SumGradient(ex, samples, grad, num_unique, dim, /*adds=*/true, out);
}

void WeightGradient(Executor& ex, const Samples& samples, const float* const* rows,
                    const float* grad, int64_t dim, float* out) {
  const bool none = samples.combiner == Combiner::kNone;
  ex.ParallelFor(samples.num_samples(), Grain(dim), [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t begin = samples.Begin(s), end = samples.End(s);
      const double divisor = none ? 1.0 : SampleDivisor(samples, begin, end);
      if (divisor == 0.0) {
        std::fill(out + begin, out + end, 0.0f);
        continue;
      }
      // out_s = S / divisor with S = sum(w v). Through S the derivative by w_k is dot_k / divisor;
      // through the divisor it is the same for all k (mean) or proportional to w_k (sqrtn).
      double through_divisor = 0.0;  // sum(w_k dot_k) = S . grad
      for (int64_t k = begin; k < end; ++k) {
        PrefetchAhead(samples, rows, k, dim);
        const double dot = Dot(rows[RowOf(samples, k)], grad + s * dim, dim);
        out[k] = static_cast<float>(dot);
        through_divisor += (samples.weights == nullptr ? 1.0 : samples.weights[k]) * dot;
      }
      if (samples.combiner == Combiner::kNone || samples.combiner == Combiner::kSum) continue;
      for (int64_t k = begin; k < end; ++k) {
        const double weight = samples.weights == nullptr ? 1.0 : samples.weights[k];
        const double slope = samples.combiner == Combiner::kMean ? 1.0 : weight / divisor;
        out[k] = static_cast<float>((out[k] - slope * through_divisor / divisor) / divisor);
      }
    }
  });
}

}  // namespace sok
