#include "cpp/core/initializer.h"

#include <algorithm>
#include <limits>

#include "cpp/core/hash.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

// Philox blocks computed together. Narrow rows fill the lanes with blocks of several keys, wide
// rows with several blocks of one key.
constexpr int kLanes = 16;

struct alignas(64) Lanes {
  uint32_t x[4][kLanes];
};

#if defined(__AVX2__)

// Four counters per register, each word in the low half of 64 bits: one multiplication gives both
// halves of a product, and leftovers in a high half never reach a low half. Twice as fast as the
// plain code, which compilers do not vectorise in this way.
void PhiloxLanes(Lanes* lanes, uint32_t key0, uint32_t key1) {
  constexpr int kGroup = 2;  // registers per word; their low halves end up in one register
  const __m256i mul0 = _mm256_set1_epi64x(kPhiloxMul0);
  const __m256i mul1 = _mm256_set1_epi64x(kPhiloxMul1);
  for (int first = 0; first < kLanes; first += 4 * kGroup) {
    __m256i c[4][kGroup];
    for (int w = 0; w < 4; ++w) {
      for (int g = 0; g < kGroup; ++g) {
        c[w][g] = _mm256_cvtepu32_epi64(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(&lanes->x[w][first + 4 * g])));
      }
    }
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const __m256i round_key0 = _mm256_set1_epi64x(k0);
      const __m256i round_key1 = _mm256_set1_epi64x(k1);
      for (int g = 0; g < kGroup; ++g) {
        const __m256i product0 = _mm256_mul_epu32(c[0][g], mul0);
        const __m256i product1 = _mm256_mul_epu32(c[2][g], mul1);
        c[0][g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), c[1][g]),
                                   round_key0);
        c[1][g] = product1;
        c[2][g] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), c[3][g]),
                                   round_key1);
        c[3][g] = product0;
      }
      k0 += kPhiloxWeyl0;
      k1 += kPhiloxWeyl1;
    }
    const __m256i low_words = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    for (int w = 0; w < 4; ++w) {
      const __m256i low = _mm256_permutevar8x32_epi32(c[w][0], low_words);
      const __m256i high = _mm256_permutevar8x32_epi32(c[w][1], low_words);
      _mm256_store_si256(reinterpret_cast<__m256i*>(&lanes->x[w][first]),
                         _mm256_blend_epi32(low, high, 0xF0));
    }
  }
}

void Transpose(const float (&values)[4][kLanes], float (&blocks)[kLanes][4]) {
  for (int i = 0; i < kLanes; i += 4) {
    __m128 a = _mm_load_ps(&values[0][i]), b = _mm_load_ps(&values[1][i]);
    __m128 c = _mm_load_ps(&values[2][i]), d = _mm_load_ps(&values[3][i]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_store_ps(blocks[i], a);
    _mm_store_ps(blocks[i + 1], b);
    _mm_store_ps(blocks[i + 2], c);
    _mm_store_ps(blocks[i + 3], d);
  }
}

#else

void PhiloxLanes(Lanes* lanes, uint32_t key0, uint32_t key1) {
  for (int i = 0; i < kLanes; ++i) {
    const PhiloxBlock block =
        Philox({{lanes->x[0][i], lanes->x[1][i], lanes->x[2][i], lanes->x[3][i]}}, key0, key1);
    for (int w = 0; w < 4; ++w) lanes->x[w][i] = block.x[w];
  }
}

void Transpose(const float (&values)[4][kLanes], float (&blocks)[kLanes][4]) {
  for (int i = 0; i < kLanes; ++i) {
    for (int w = 0; w < 4; ++w) blocks[i][w] = values[w][i];
  }
}

#endif

// Which block of which row each lane computes.
struct Items {
  uint64_t key[kLanes];
  uint32_t block[kLanes];
  float* out[kLanes];  // column 4 * block of the row
  int count[kLanes];   // columns of the block, 1..4
};

// Fills up to kLanes blocks. Lanes past `num_items` hold leftovers that nothing reads.
void FillItems(const Initializer& init, const Items& items, int num_items) {
  Lanes lanes;
  for (int i = 0; i < kLanes; ++i) {
    lanes.x[0][i] = static_cast<uint32_t>(items.key[i]);
    lanes.x[1][i] = static_cast<uint32_t>(items.key[i] >> 32);
    lanes.x[2][i] = items.block[i];
    lanes.x[3][i] = 0;
  }
  PhiloxLanes(&lanes, init.philox_key0, init.philox_key1);
  alignas(64) float values[4][kLanes];
  if (init.kind == InitializerKind::kUniform) {
    for (int w = 0; w < 4; ++w) {
      for (int i = 0; i < kLanes; ++i) values[w][i] = UniformValue(init, lanes.x[w][i]);
    }
  } else {
    for (int w = 0; w < 4; w += 2) {
      for (int i = 0; i < kLanes; ++i) {
        NormalPair(lanes.x[w][i], lanes.x[w + 1][i], &values[w][i], &values[w + 1][i]);
      }
    }
    if (init.kind == InitializerKind::kTruncatedNormal) {
      for (int w = 0; w < 4; ++w) {
        for (int i = 0; i < num_items; ++i) {
          if (values[w][i] > -2.0f && values[w][i] < 2.0f) continue;
          values[w][i] = TruncatedNormal(init, items.key[i], items.block[i] * 4 + w, 1);
        }
      }
    }
    for (int w = 0; w < 4; ++w) {
      for (int i = 0; i < kLanes; ++i) values[w][i] = init.a + init.scale * values[w][i];
    }
  }
  alignas(64) float blocks[kLanes][4];
  Transpose(values, blocks);
  for (int i = 0; i < num_items; ++i) {
    if (items.count[i] == 4) {
      std::memcpy(items.out[i], blocks[i], sizeof blocks[i]);
    } else {
      std::copy_n(blocks[i], items.count[i], items.out[i]);
    }
  }
}

}  // namespace

Initializer MakeInitializer(const InitializerOptions& options, uint64_t seed,
                            uint64_t table_name_hash, int64_t dim) {
  Initializer init;
  init.kind = options.kind;
  init.a = options.a;
  init.scale = options.kind == InitializerKind::kUniform ? options.b - options.a : options.b;
  init.limit =
      std::max(options.a, std::nextafter(options.b, -std::numeric_limits<float>::infinity()));
  const uint64_t stream = HashKey(HashKey(seed + 0x9E3779B97F4A7C15ull) ^ table_name_hash);
  init.philox_key0 = static_cast<uint32_t>(stream);
  init.philox_key1 = static_cast<uint32_t>(stream >> 32);
  if (options.kind == InitializerKind::kDefaultRows) {
    init.default_rows = options.default_rows.data();
    init.num_default_rows = options.default_rows.size() / static_cast<size_t>(dim);
  }
  return init;
}

void InitialRows(const Initializer& init, const uint64_t* keys, int64_t num_keys, int64_t dim,
                 float* const* rows) {
  if (init.kind == InitializerKind::kConstant) {
    for (int64_t i = 0; i < num_keys; ++i) std::fill_n(rows[i], dim, init.a);
    return;
  }
  if (init.kind == InitializerKind::kDefaultRows) {
    for (int64_t i = 0; i < num_keys; ++i) {
      std::copy_n(init.default_rows + (keys[i] % init.num_default_rows) * dim, dim, rows[i]);
    }
    return;
  }
  Items items = {};
  int n = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    for (int64_t column = 0; column < dim; column += 4) {
      items.key[n] = keys[i];
      items.block[n] = static_cast<uint32_t>(column / 4);
      items.out[n] = rows[i] + column;
      items.count[n] = static_cast<int>(std::min<int64_t>(4, dim - column));
      if (++n == kLanes) {
        FillItems(init, items, n);
        n = 0;
      }
    }
  }
  if (n > 0) FillItems(init, items, n);
}

}  // namespace sok
