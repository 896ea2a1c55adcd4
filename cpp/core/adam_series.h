// Brings elements of an idle row up to date: by the series or, if the series is too long, step by
// step. adam_replay.h explains both. Shared by host and device.
#ifndef SOK_CORE_ADAM_SERIES_H_
#define SOK_CORE_ADAM_SERIES_H_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cpp/core/platform.h"

namespace sok {

// out = w * row_factor - m / D * sum_i q^i term(i) for `count` <= kBlock elements.
// `out` may be `w`: everything is read before the first write. `Count` is an integer, or an
// integral_constant that lets the compiler unroll.
template <int kBlock, typename Term, typename Count>
SOK_HD inline void ReplaySeries(float row_factor, const Term& term, int num_terms, float epsilon,
                                const float* w, const float* m, const float* v, Count count,
                                float* out) {
  // m and v are 0 in a row that never had a gradient. With epsilon 0 too, 0 / 0 must give 0.
  constexpr float kTiny = FLT_MIN;
  float q[kBlock], m_over_d[kBlock], sum[kBlock];
  const float last = term(num_terms - 1);
  for (int64_t d = 0; d < count; ++d) {
    const float root = std::sqrt(v[d]);
    const float denominator = root + epsilon;
    const float inverse = 1.0f / (denominator < kTiny ? kTiny : denominator);
    q[d] = root * inverse;
    m_over_d[d] = m[d] * inverse;
    sum[d] = last;
  }
  for (int i = num_terms - 2; i >= 0; --i) {
    const float value = term(i);
    for (int64_t d = 0; d < count; ++d) sum[d] = sum[d] * q[d] + value;
  }
  for (int64_t d = 0; d < count; ++d) sum[d] = w[d] * row_factor - m_over_d[d] * sum[d];
  for (int64_t d = 0; d < count; ++d) out[d] = sum[d];
}

// Replays the steps first..end one at a time on `count` <= kBlock elements, then multiplies by
// `rest`, the weight decay of the later steps, in which no momentum is left. `steps` has double
// Alpha(k) and Decay(k). In double: thousands of rounding errors would add up. `out` may be `w`.
template <int kBlock, typename Steps, typename Count>
SOK_HD inline void WalkSteps(const Steps& steps, uint32_t first, uint32_t end, double rest,
                             double beta_1, double beta_2, float epsilon, const float* w,
                             const float* m, const float* v, Count count, float* out) {
  double walked_w[kBlock], walked_m[kBlock], walked_v[kBlock];
  for (int64_t d = 0; d < count; ++d) {
    walked_w[d] = w[d];
    walked_m[d] = m[d];
    walked_v[d] = v[d];
  }
  for (uint32_t k = first; k <= end; ++k) {
    const double decay = steps.Decay(k);
    const double alpha = steps.Alpha(k);
    for (int64_t d = 0; d < count; ++d) {
      walked_m[d] *= beta_1;
      walked_v[d] *= beta_2;
      walked_w[d] *= decay;
      // Avoids 0 / 0 in a row that never had a gradient, if epsilon is 0.
      if (walked_m[d] != 0.0) {
        walked_w[d] -= alpha * walked_m[d] / (std::sqrt(walked_v[d]) + epsilon);
      }
    }
  }
  for (int64_t d = 0; d < count; ++d) out[d] = static_cast<float>(walked_w[d] * rest);
}

}  // namespace sok

#endif  // SOK_CORE_ADAM_SERIES_H_
