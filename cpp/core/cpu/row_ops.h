// Loops over one row, written once for all row widths.
//
// `WithDim` turns the widths that models use into compile-time constants, so that the compiler
// unrolls and vectorises the loop over a row; any other width runs the same code with a variable.
// Each such loop needs `omp simd`: without it g++ unrolls up to 16 iterations before it vectorises.
#ifndef SOK_CORE_CPU_ROW_OPS_H_
#define SOK_CORE_CPU_ROW_OPS_H_

#include <cstdint>
#include <type_traits>

namespace sok {

inline constexpr int64_t kCacheLineFloats = 16;

// Prefetches the first lines of `row`; beyond those the hardware prefetches the stream by itself.
// kWrite: the row will be written too.
template <bool kWrite>
inline void PrefetchRow(const float* row, int64_t num_floats) {
  constexpr int64_t kMaxFloats = 16 * kCacheLineFloats;
  const int64_t end = num_floats < kMaxFloats ? num_floats : kMaxFloats;
  for (int64_t d = 0; d < end; d += kCacheLineFloats) {
    __builtin_prefetch(row + d, kWrite ? 1 : 0, 3);
  }
  // A row that does not start at a line boundary ends in one more line.
  __builtin_prefetch(row + end - 1, kWrite ? 1 : 0, 3);
}

// Calls f(std::integral_constant<int64_t, D>) with D = dim, or 0 when dim has no code of its own.
template <typename F>
inline void WithDim(int64_t dim, F&& f) {
  switch (dim) {
    case 4:
      return f(std::integral_constant<int64_t, 4>{});
    case 8:
      return f(std::integral_constant<int64_t, 8>{});
    case 16:
      return f(std::integral_constant<int64_t, 16>{});
    case 32:
      return f(std::integral_constant<int64_t, 32>{});
    case 64:
      return f(std::integral_constant<int64_t, 64>{});
    case 128:
      return f(std::integral_constant<int64_t, 128>{});
    default:
      return f(std::integral_constant<int64_t, 0>{});
  }
}

template <int64_t kDim>
inline void AddScaled(const float* __restrict row, float scale, int64_t variable_dim,
                      float* __restrict sum) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) sum[d] += scale * row[d];
}

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_OPS_H_
