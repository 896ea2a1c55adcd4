#include "cpp/core/crc32.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sok {
namespace {

// Polynomials of degree < 32 with bit i as the coefficient of x^(31 - i), as zip files store them.
constexpr uint32_t kPolynomial = 0xEDB88320u;
constexpr uint32_t kOne = 0x80000000u;

constexpr uint32_t TimesX(uint32_t a) { return (a & 1) != 0 ? a >> 1 ^ kPolynomial : a >> 1; }

constexpr uint32_t Product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i, b = TimesX(b)) {
    if ((a & kOne >> i) != 0) sum ^= b;
  }
  return sum;
}

constexpr uint32_t PowerOfX(uint64_t exponent) {
  uint32_t power = kOne, square = TimesX(kOne);
  for (; exponent > 0; exponent >>= 1, square = Product(square, square)) {
    if ((exponent & 1) != 0) power = Product(power, square);
  }
  return power;
}

// tables[k][byte]: the byte, followed by k zero bytes.
struct Tables {
  uint32_t of[8][256];
  constexpr Tables() : of() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t a = byte;
      for (int i = 0; i < 8; ++i) a = TimesX(a);
      of[0][byte] = a;
    }
    for (int k = 1; k < 8; ++k) {
      for (int byte = 0; byte < 256; ++byte) {
        of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
      }
    }
  }
};
constexpr Tables kTables;

uint32_t ByTable(uint32_t state, const uint8_t* data, size_t num_bytes) {
  const auto& of = kTables.of;
  for (; num_bytes >= 8; num_bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= of[7 - k][word >> (8 * k) & 255];
  }
  for (; num_bytes > 0; --num_bytes, ++data) state = state >> 8 ^ of[0][(state ^ *data) & 255];
  return state;
}

#if defined(__x86_64__)
// The factor for a shift by `bits`, as an operand of the multiplication: its product is 32 bits
// further on than the register it is added to, and one bit narrower.
constexpr int64_t Factor(int bits) {
  return static_cast<int64_t>(uint64_t{PowerOfX(static_cast<uint64_t>(bits) - 32)} << 1);
}

// The lower eight bytes come first in the file, so they move 64 bits further.
template <int kBits>
__attribute__((target("pclmul,sse4.1"))) inline __m128i Moved(__m128i a) {
  constexpr int64_t kLower = Factor(kBits + 64), kUpper = Factor(kBits);
  const __m128i factors = _mm_set_epi64x(kUpper, kLower);
  return _mm_xor_si128(_mm_clmulepi64_si128(a, factors, 0x00),
                       _mm_clmulepi64_si128(a, factors, 0x11));
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i At(const uint8_t* data, int i) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
}

// Needs 64 bytes at least. Sets `data` and `num_bytes` to what is left, fewer than 16 bytes.
__attribute__((target("pclmul,sse4.1"))) uint32_t Folded(uint32_t state, const uint8_t** data,
                                                         size_t* num_bytes) {
  const uint8_t* from = *data;
  size_t left = *num_bytes;
  __m128i a = _mm_xor_si128(At(from, 0), _mm_cvtsi32_si128(static_cast<int>(state)));
  __m128i b = At(from, 1), c = At(from, 2), d = At(from, 3);
  for (from += 64, left -= 64; left >= 64; from += 64, left -= 64) {
    a = _mm_xor_si128(Moved<512>(a), At(from, 0));
    b = _mm_xor_si128(Moved<512>(b), At(from, 1));
    c = _mm_xor_si128(Moved<512>(c), At(from, 2));
    d = _mm_xor_si128(Moved<512>(d), At(from, 3));
  }
  b = _mm_xor_si128(Moved<128>(a), b);
  c = _mm_xor_si128(Moved<128>(b), c);
  d = _mm_xor_si128(Moved<128>(c), d);
  for (; left >= 16; from += 16, left -= 16) d = _mm_xor_si128(Moved<128>(d), At(from, 0));
  uint8_t last[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(last), d);
  *data = from;
  *num_bytes = left;
  return ByTable(0, last, 16);
}
#endif

}  // namespace

uint32_t Crc32(uint32_t before, const void* data, size_t num_bytes) {
  const uint8_t* from = static_cast<const uint8_t*>(data);
  uint32_t state = ~before;
#if defined(__x86_64__)
  static const bool kFolds =
      __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (kFolds && num_bytes >= 64) state = Folded(state, &from, &num_bytes);
#endif
  return ~ByTable(state, from, num_bytes);
}

uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t num_bytes) {
  return Product(first, PowerOfX(8 * num_bytes)) ^ second;
}

}  // namespace sok
