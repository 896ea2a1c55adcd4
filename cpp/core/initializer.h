// Initial rows: a pure function of (seed, table name, key, column).
//
// No state and no order: an initial value depends neither on when a key arrived, nor on the batch,
// the thread, the rank or the width of the row. One rank, N ranks, CPU and GPU therefore start from
// the same bits, and a missing key can be read without being inserted.
//
//     Philox counter  | key, low half | key, high half | column / 4 | draw |    key: seed and name
//     Philox block    | column 4b     | 4b + 1         | 4b + 2     | 4b + 3 |
//
// `draw` is 0 except for the truncated normal, which draws again beyond two standard deviations.
//
// Bit-equality: only integer operations and the IEEE operations + - * / sqrt are used (logarithm,
// sine and cosine are implemented below), because libm and CUDA's functions round differently. The
// compiler must not contract a * b + c: -ffp-contract=off here, -fmad=false under nvcc.
//
// Cost: a block of four columns is ten rounds of two multiplications, about 4 ns.
#ifndef SOK_CORE_INITIALIZER_H_
#define SOK_CORE_INITIALIZER_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpp/core/philox.h"
#include "cpp/core/platform.h"
#include "cpp/core/table_options.h"

namespace sok {

// InitializerOptions with everything precomputed that does not depend on key and column. Trivially
// copyable, so that a kernel can take it by value.
struct Initializer {
  InitializerKind kind = InitializerKind::kUniform;
  float a = 0.0f;
  float scale = 0.0f;  // uniform: b - a; normal: stddev
  float limit = 0.0f;  // uniform: largest value allowed, the float below b (rounding may reach b)
  uint32_t philox_key0 = 0;
  uint32_t philox_key1 = 0;
  const float* default_rows = nullptr;  // [num_default_rows, dim]; the options must outlive this
  uint64_t num_default_rows = 0;
};

Initializer MakeInitializer(const InitializerOptions& options, uint64_t seed,
                            uint64_t table_name_hash, int64_t dim);

// Many rows, several at a time in vector registers; the same bits as InitialElement.
void InitialRows(const Initializer& initializer, const uint64_t* keys, int64_t num_keys,
                 int64_t dim, float* const* rows);  // rows[i] [dim]

// ---- shared by host and device ----

SOK_HD inline PhiloxBlock InitialBlock(const Initializer& init, uint64_t key, uint32_t block,
                                       uint32_t draw) {
  const PhiloxBlock counter{
      {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32), block, draw}};
  return Philox(counter, init.philox_key0, init.philox_key1);
}

SOK_HD inline float UniformValue(const Initializer& init, uint32_t bits) {
  // Int32 because vector units convert only signed integers; 24 bits are exact in a float.
  const float unit = static_cast<float>(static_cast<int32_t>(bits >> 8)) * 0x1p-24f;  // [0, 1)
  const float value = init.a + init.scale * unit;
  return value < init.limit ? value : init.limit;
}

// Natural logarithm of a normal float in (0, 1]: log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1))
// with m in [sqrt(1/2), sqrt(2)), where five terms of artanh's series leave an error of 2e-9.
SOK_HD inline float LogOf(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t sqrt_half = 0x3F3504F3;
  const int32_t exponent = (bits - sqrt_half) >> 23;
  bits -= exponent * (1 << 23);
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float t = s * s;
  const float tail =
      t * (0x1.555556p-2f + t * (0x1.99999ap-3f + t * (0x1.24924ap-3f + t * 0x1.c71c72p-4f)));
  return static_cast<float>(exponent) * 0x1.62e430p-1f + 2.0f * (s + s * tail);
}

// Two standard normals from 64 random bits (Box and Muller, 1958).
SOK_HD inline void NormalPair(uint32_t bits0, uint32_t bits1, float* z0, float* z1) {
  const float unit = static_cast<float>(static_cast<int32_t>(bits0 >> 8) + 1) * 0x1p-24f;  // (0, 1]
  const float radius = std::sqrt(-2.0f * LogOf(unit));
  // The angle is 2 pi bits1 / 2^32, split into the nearest quarter turn and the rest.
  const uint32_t quarter = (bits1 + 0x20000000u) >> 30;
  const int32_t rest = static_cast<int32_t>(bits1 << 2) >> 8;  // in 2^-24 quarter turns, +-2^23
  const float angle = static_cast<float>(rest) * 0x1.921fb6p-24f;
  const float t = angle * angle;
  const float sine =
      angle + angle * (t * (-0x1.555556p-3f +
                            t * (0x1.111112p-7f + t * (-0x1.a01a02p-13f + t * 0x1.71de3ap-19f))));
  const float cosine =
      1.0f +
      t * (-0.5f + t * (0x1.555556p-5f +
                        t * (-0x1.6c16c2p-10f + t * (0x1.a01a02p-16f + t * -0x1.27e4fcp-22f))));
  const float x = (quarter & 1) ? sine : cosine;
  const float y = (quarter & 1) ? cosine : sine;
  *z0 = radius * ((quarter == 1 || quarter == 2) ? -x : x);
  *z1 = radius * ((quarter >= 2) ? -y : y);
}

// Selected, not indexed: a run-time index would move the register array to memory on a device.
SOK_HD inline uint32_t WordOfBlock(const PhiloxBlock& block, uint32_t lane) {
  const uint32_t low = (lane & 1) ? block.x[1] : block.x[0];
  const uint32_t high = (lane & 1) ? block.x[3] : block.x[2];
  return (lane & 2) ? high : low;
}

SOK_HD inline float NormalOfBlock(const PhiloxBlock& block, uint32_t lane) {
  float z0, z1;
  NormalPair(WordOfBlock(block, lane & 2), WordOfBlock(block, lane | 1), &z0, &z1);
  return (lane & 1) ? z1 : z0;
}

// The first standard normal within two standard deviations, from `draw` on. 4.6% of draws fail;
// the bound only makes sure that the loop ends.
SOK_HD inline float TruncatedNormal(const Initializer& init, uint64_t key, uint32_t column,
                                    uint32_t draw) {
  for (; draw < 64; ++draw) {
    const float z = NormalOfBlock(InitialBlock(init, key, column / 4, draw), column % 4);
    if (z > -2.0f && z < 2.0f) return z;
  }
  return 0.0f;
}

// The columns 4 * block .. 4 * block + 3 of a row, which one Philox block gives. `out` [4]; columns
// from `dim` on are undefined.
SOK_HD inline void InitialQuad(const Initializer& init, uint64_t key, uint32_t block, int64_t dim,
                               float* out) {
  if (init.kind == InitializerKind::kConstant) {
    for (int i = 0; i < 4; ++i) out[i] = init.a;
    return;
  }
  if (init.kind == InitializerKind::kDefaultRows) {
    const float* const row = init.default_rows + (key % init.num_default_rows) * dim;
    const int64_t first = int64_t{block} * 4;
    for (int i = 0; i < 4; ++i) out[i] = first + i < dim ? row[first + i] : 0.0f;
    return;
  }
  const PhiloxBlock bits = InitialBlock(init, key, block, 0);
  if (init.kind == InitializerKind::kUniform) {
    for (int i = 0; i < 4; ++i) out[i] = UniformValue(init, bits.x[i]);
    return;
  }
  NormalPair(bits.x[0], bits.x[1], out, out + 1);
  NormalPair(bits.x[2], bits.x[3], out + 2, out + 3);
  for (int i = 0; i < 4; ++i) {
    if (init.kind == InitializerKind::kTruncatedNormal && !(out[i] > -2.0f && out[i] < 2.0f)) {
      out[i] = TruncatedNormal(init, key, 4 * block + i, 1);
    }
    out[i] = init.a + init.scale * out[i];
  }
}

SOK_HD inline float InitialElement(const Initializer& init, uint64_t key, uint32_t column,
                                   int64_t dim) {
  switch (init.kind) {
    case InitializerKind::kUniform:
      return UniformValue(init, WordOfBlock(InitialBlock(init, key, column / 4, 0), column % 4));
    case InitializerKind::kNormal:
      return init.a +
             init.scale * NormalOfBlock(InitialBlock(init, key, column / 4, 0), column % 4);
    case InitializerKind::kTruncatedNormal:
      return init.a + init.scale * TruncatedNormal(init, key, column, 0);
    case InitializerKind::kDefaultRows:
      return init.default_rows[(key % init.num_default_rows) * dim + column];
    case InitializerKind::kConstant:
      break;
  }
  return init.a;
}

}  // namespace sok

#endif  // SOK_CORE_INITIALIZER_H_
