// 16-bit floats: conversion from float32 and back.
//
//     float32   | sign | exponent 8 | fraction 23 |
//     bfloat16  | sign | exponent 8 | fraction 7  |
//     float16   | sign | exponent 5 | fraction 10 |     subnormal below 2^-14
//
// kNearest rounds to the nearest number, ties to even (IEEE 754), so small updates are lost.
// kStochastic uses 16 random bits, `noise`, to round up or down so that the expected value is the
// number itself; small updates then add up (Gupta et al., "Deep learning with limited numerical
// precision", ICML 2015).
//
// Uses integer operations only, except for one subtraction of normal floats: TensorFlow's threads
// flush subnormals to zero, and results must not depend on the thread.
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

// How both formats round. kNearest ignores `noise`.
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
    // Random rounding must not turn a finite number into infinity.
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
    // Computed for every number and selected by bits, so that a loop over a row vectorises.
    const float subnormal = FloatOfBits(magnitude + kSmallestNormal) - FloatOfBits(kSmallestNormal);
    uint32_t bits =
        magnitude + (exponent == 31u << 23 ? 224u << 23 : 112u << 23);  // float32's bias
    const uint32_t is_subnormal = 0u - static_cast<uint32_t>(exponent == 0);
    bits = (bits & ~is_subnormal) | (FloatBits(subnormal) & is_subnormal);
    return FloatOfBits(bits | (x & 0x8000u) << 16);
  }

  template <Rounding kRounding>
  static uint16_t Narrow(float x, uint32_t noise) {
    constexpr uint32_t kInfinity = 0x7C00u, kBias = 113;  // kBias: 2^-14 as a float32 exponent
    const uint32_t bits = FloatBits(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t exponent = (bits >> 23) & 0xFFu;
    uint32_t fraction = bits & 0x7FFFFFu;
    if (exponent == 0xFFu) {
      return static_cast<uint16_t>(sign | kInfinity | (fraction != 0 ? 0x200u : 0));
    }
    if (exponent != 0) fraction |= 0x800000u;
    // Bits to cut: 13, or more below 2^-14.
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
      // Random rounding must not turn a number below 2^16 into infinity.
      const bool is_small = kRounding == Rounding::kStochastic && exponent < 127 + 16;
      magnitude = is_small ? kInfinity - 1 : kInfinity;
    }
    return static_cast<uint16_t>(sign | magnitude);
  }
};

}  // namespace sok

#endif  // SOK_CORE_NARROW_H_
