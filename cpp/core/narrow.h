// Floats of 16 bits: from float32 and back.
//
//     float32   | sign | exponent 8 | fraction 23 |
//     bfloat16  | sign | exponent 8 | fraction 7  |
//     float16   | sign | exponent 5 | fraction 10 |     subnormal below 2^-14
//
// A number between two of them becomes the nearer one, of two equally near ones the even one (IEEE
// 754), or with `noise` one of the two at random: noise is 16 random bits, and the expected value is
// the number itself (stochastic rounding; Gupta et al., "Deep learning with limited numerical
// precision", ICML 2015). Small updates are then not lost, as they are where the nearest is taken.
//
// Integer operations alone, but for one subtraction of normal floats: TensorFlow has its threads
// flush subnormals to zero, and these must not change with the thread.
#ifndef SOK_CORE_NARROW_H_
#define SOK_CORE_NARROW_H_

#include <cstdint>
#include <cstring>

namespace sok {

inline uint32_t FloatBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FloatOfBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// What both formats share of rounding. kNearest ignores `noise`.
enum class Rounding { kNearest, kStochastic };

struct Bfloat16 {
  static constexpr const char* kName = "bfloat16";

  static float Widen(uint16_t x) { return FloatOfBits(uint32_t{x} << 16); }

  template <Rounding kRounding>
  static uint16_t Narrow(float x, uint32_t noise) {
    constexpr uint32_t kInfinity = 0x7F800000u;
    const uint32_t bits = FloatBits(x);
    const uint32_t cut = bits >> 16;
    if ((bits & kInfinity) == kInfinity) {
      return static_cast<uint16_t>((bits & 0x7FFFFFu) != 0 ? cut | 0x40u : cut);  // NaN stays NaN
    }
    if (kRounding == Rounding::kNearest) noise = 0x7FFFu + (cut & 1);
    const uint32_t rounded = (bits + noise) >> 16;
    // Chance must not make an infinity.
    const bool overflows = kRounding == Rounding::kStochastic && (rounded & 0x7F80u) == 0x7F80u;
    return static_cast<uint16_t>(overflows ? cut : rounded);
  }
};

struct Float16 {
  static constexpr const char* kName = "float16";

  static float Widen(uint16_t x) {
    constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
    const uint32_t magnitude = (x & 0x7FFFu) << 13;
    const uint32_t exponent = magnitude & (31u << 23);
    // Computed for all, and chosen by bits, so that a loop over a row runs in vectors.
    const float subnormal = FloatOfBits(magnitude + kSmallestNormal) - FloatOfBits(kSmallestNormal);
    uint32_t bits =
        magnitude + (exponent == 31u << 23 ? 224u << 23 : 112u << 23);  // the other bias
    const uint32_t is_subnormal = 0u - static_cast<uint32_t>(exponent == 0);
    bits = (bits & ~is_subnormal) | (FloatBits(subnormal) & is_subnormal);
    return FloatOfBits(bits | (x & 0x8000u) << 16);
  }

  template <Rounding kRounding>
  static uint16_t Narrow(float x, uint32_t noise) {
    constexpr uint32_t kInfinity = 0x7C00u, kBias = 113;  // of float32's exponent: 2^-14
    const uint32_t bits = FloatBits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t exponent = (bits >> 23) & 0xFFu;
    uint32_t fraction = bits & 0x7FFFFFu;
    if (exponent == 0xFFu) {
      return static_cast<uint16_t>(sign | kInfinity | (fraction != 0 ? 0x200u : 0));
    }
    if (exponent != 0) fraction |= 0x800000u;
    // Bits to cut: 13, below 2^-14 more.
    uint32_t shift = exponent < kBias ? 13 + kBias - exponent : 13;
    if (shift > 31) {  // below 2^-32
      fraction >>= shift - 31 < 24 ? shift - 31 : 24;
      shift = 31;
    }
    if (kRounding == Rounding::kNearest) {
      noise = (1u << (shift - 1)) - 1 + ((fraction >> shift) & 1);
    } else {
      noise = shift < 16 ? noise >> (16 - shift) : noise << (shift - 16);
    }
    // A fraction that rounds up to the next power of two carries into the exponent.
    const uint32_t biased = exponent < kBias ? 0 : (exponent - kBias) << 10;
    uint32_t magnitude = biased + ((fraction + noise) >> shift);
    if (magnitude >= kInfinity) {
      // Chance must not make an infinity of what lies below 2^16.
      const bool is_small = kRounding == Rounding::kStochastic && exponent < 127 + 16;
      magnitude = is_small ? kInfinity - 1 : kInfinity;
    }
    return static_cast<uint16_t>(sign | magnitude);
  }
};

}  // namespace sok

#endif  // SOK_CORE_NARROW_H_
