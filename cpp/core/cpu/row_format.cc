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

// The finalizer of MurmurHash3 (Appleby): neighbours give unrelated bits, and it vectorises.
inline uint32_t Mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
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
  const PhiloxBlock random =
      Philox(PhiloxBlock{{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
                          static_cast<uint32_t>(first), static_cast<uint32_t>(step)}},
             philox_key0_, philox_key1_ ^ static_cast<uint32_t>(static_cast<uint64_t>(step) >> 32));
  const uint32_t start = random.x[0], stride = random.x[1] | 1;
  WithHalf(type_, [&](auto half) {
#pragma omp simd
    for (int64_t d = 0; d < count; ++d) {
      const uint32_t noise = Mixed(start + static_cast<uint32_t>(d) * stride) >> 16;
      halves[d] = half.template Narrow<Rounding::kStochastic>(values[d], noise);
    }
  });
}

}  // namespace sok
