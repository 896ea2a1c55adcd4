#include "cpp/core/cpu/row_format.h"

#include <cmath>

#include "cpp/core/philox.h"

namespace sok {
namespace {

inline const uint16_t* Halves(const float* row) { return reinterpret_cast<const uint16_t*>(row); }
inline uint16_t* Halves(float* row) { return reinterpret_cast<uint16_t*>(row); }

template <typename F>
inline void WithHalf(RowType type, F&& f) {
  if (type == RowType::kBfloat16) return f(Bfloat16());
  f(Float16());
}

}  // namespace

void RowFormat::ReadColumns(const float* row, int64_t first, int64_t count, float* values) const {
  const uint16_t* const halves = Halves(row) + first;
  WithHalf(type_, [&](auto half) {
#pragma omp simd
    for (int64_t d = 0; d < count; ++d) values[d] = half.Widen(halves[d]);
  });
}

void RowFormat::Write(const float* values, float* row) const {
  uint16_t* const halves = Halves(row);
  WithHalf(type_, [&](auto half) {
#pragma omp simd
    for (int64_t d = 0; d < dim_; ++d) {
      halves[d] = half.template Narrow<Rounding::kNearest>(values[d], 0);
    }
  });
}

void RowFormat::Round(float* values) const {
  WithHalf(type_, [&](auto half) {
#pragma omp simd
    for (int64_t d = 0; d < dim_; ++d) {
      values[d] = half.Widen(half.template Narrow<Rounding::kNearest>(values[d], 0));
    }
  });
}

bool RowFormat::Holds(const float* values, int64_t count) const {
  bool holds = true;
  WithHalf(type_, [&](auto half) {
    for (int64_t d = 0; d < count; ++d) {
      const float rounded = half.Widen(half.template Narrow<Rounding::kNearest>(values[d], 0));
      holds &= !std::isinf(rounded) || std::isinf(values[d]);
    }
  });
  return holds;
}

void RowFormat::WriteUpdated(const float* values, uint64_t key, int64_t step, int64_t first,
                             int64_t count, float* row) const {
  uint16_t* const halves = Halves(row) + first;
  const uint32_t key1 = philox_key1_ ^ static_cast<uint32_t>(static_cast<uint64_t>(step) >> 32);
  WithHalf(type_, [&](auto half) {
    for (int64_t begin = 0; begin < count; begin += 8) {
      const PhiloxBlock random = Philox(
          PhiloxBlock{{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                       static_cast<uint32_t>((first + begin) / 8), static_cast<uint32_t>(step)}},
          philox_key0_, key1);
      uint16_t noise[8];
      for (int i = 0; i < 8; ++i) {
        noise[i] = static_cast<uint16_t>(random.x[i / 2] >> (16 * (i % 2)));
      }
      const int64_t n = std::min<int64_t>(8, count - begin);
      for (int64_t i = 0; i < n; ++i) {
        halves[begin + i] =
            half.template Narrow<Rounding::kStochastic>(values[begin + i], noise[i]);
      }
    }
  });
}

}  // namespace sok
