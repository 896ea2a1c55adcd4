// The series that brings elements of an idle row up to date: see adam_replay.h for its derivation.
// Shared by host and device.
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
  // A row that never had a gradient has no momentum either: 0 / 0 is to stay 0.
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

}  // namespace sok

#endif  // SOK_CORE_ADAM_SERIES_H_
