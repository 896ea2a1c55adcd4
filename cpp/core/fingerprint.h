// The 64-bit FarmHash fingerprint of a string, as TensorFlow's Fingerprint and Google's FarmHash
// define it: the same in every process and release, so it may be stored.
//
//     length   0 to 16    17 to 32    33 to 64    more
//     reads    both ends  4 words     8 words     64 bytes at a time, and the last 64
//
// Words are read from both ends, and may overlap. Here, because the functions of the op's library are
// compiled for any processor, and a call costs as much as a short string.
#ifndef SOK_CORE_FINGERPRINT_H_
#define SOK_CORE_FINGERPRINT_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace sok {
namespace fingerprint {

inline constexpr uint64_t k0 = 0xc3a5c85c97cb3127u, k1 = 0xb492b66fbe98f273u,
                          k2 = 0x9ae16a3b2f90404fu;

// Numbers in strings are little-endian, as the processors are that this is built for.
template <typename T = uint64_t>
T Read(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

inline uint64_t Rotate(uint64_t value, int bits) { return value >> bits | value << (64 - bits); }
inline uint64_t ShiftMix(uint64_t value) { return value ^ value >> 47; }

inline uint64_t Mix(uint64_t a, uint64_t b, uint64_t factor) {
  const uint64_t mixed = ShiftMix((a ^ b) * factor);
  return ShiftMix((b ^ mixed) * factor) * factor;
}

inline uint64_t UpTo16(const char* s, uint64_t length) {
  const uint64_t factor = k2 + 2 * length;
  if (length >= 8) {
    const uint64_t a = Read(s) + k2, b = Read(s + length - 8);
    return Mix(Rotate(b, 37) * factor + a, (Rotate(a, 25) + b) * factor, factor);
  }
  if (length >= 4) {
    const uint64_t first = Read<uint32_t>(s), last = Read<uint32_t>(s + length - 4);
    return Mix(length + (first << 3), last, factor);
  }
  if (length == 0) return k2;
  const uint32_t first = Read<uint8_t>(s), middle = Read<uint8_t>(s + length / 2);
  const uint32_t last = Read<uint8_t>(s + length - 1);
  const uint32_t low = first + (middle << 8), high = static_cast<uint32_t>(length) + (last << 2);
  return ShiftMix(low * k2 ^ high * k0) * k2;
}

inline uint64_t UpTo32(const char* s, uint64_t length) {
  const uint64_t factor = k2 + 2 * length;
  const uint64_t a = Read(s) * k1, b = Read(s + 8), c = Read(s + length - 8) * factor,
                 d = Read(s + length - 16) * k2;
  return Mix(Rotate(a + b, 43) + Rotate(c, 30) + d, a + Rotate(b + k2, 18) + c, factor);
}

inline uint64_t UpTo64(const char* s, uint64_t length) {
  const uint64_t factor = k2 + 2 * length;
  const uint64_t a = Read(s) * k2, b = Read(s + 8), c = Read(s + length - 8) * factor,
                 d = Read(s + length - 16) * k2;
  const uint64_t y = Rotate(a + b, 43) + Rotate(c, 30) + d;
  const uint64_t z = Mix(y, a + Rotate(b + k2, 18) + c, factor);
  const uint64_t e = Read(s + 16) * factor, f = Read(s + 24);
  const uint64_t g = (y + Read(s + length - 32)) * factor, h = (z + Read(s + length - 24)) * factor;
  return Mix(Rotate(e + f, 43) + Rotate(g, 30) + h, e + Rotate(f + a, 18) + g, factor);
}

struct Pair {
  uint64_t first = 0, second = 0;
};

// Of 32 bytes, with two seeds.
inline Pair Of32(const char* s, uint64_t a, uint64_t b) {
  const uint64_t w = Read(s), x = Read(s + 8), y = Read(s + 16), z = Read(s + 24);
  a += w;
  b = Rotate(b + a + z, 21);
  const uint64_t sum = a + x + y;
  return {sum + z, b + Rotate(sum, 44) + a};
}

// The state of a long string.
struct State {
  uint64_t x, y, z;
  Pair v, w;

  // Takes 64 bytes. `scale` is 1, and 9 for the last ones.
  void Take(const char* s, uint64_t factor, uint64_t scale) {
    x = Rotate(x + y + v.first + Read(s + 8), 37) * factor;
    y = Rotate(y + v.second + Read(s + 48), 42) * factor;
    x ^= w.second * scale;
    y += v.first * scale + Read(s + 40);
    z = Rotate(z + w.first, 33) * factor;
    v = Of32(s, v.second * factor, x + w.first);
    w = Of32(s + 32, z + w.second, y + Read(s + 16));
    std::swap(z, x);
  }
};

inline uint64_t Longer(const char* s, uint64_t length) {
  constexpr uint64_t kSeed = 81;
  State state{};
  state.x = kSeed * k2 + Read(s);
  state.y = kSeed * k1 + 113;
  state.z = ShiftMix(state.y * k2 + 113) * k2;
  const uint64_t before_last = (length - 1) % 64;  // bytes of the last piece, less one
  const char* const end = s + (length - 1 - before_last);
  for (; s != end; s += 64) state.Take(s, k1, 1);
  const uint64_t factor = k1 + ((state.z & 0xff) << 1);
  state.w.first += before_last;
  state.v.first += state.w.first;
  state.w.first += state.v.first;
  state.Take(end + before_last - 63, factor, 9);
  return Mix(Mix(state.v.first, state.w.first, factor) + ShiftMix(state.y) * k0 + state.z,
             Mix(state.v.second, state.w.second, factor) + state.x, factor);
}

}  // namespace fingerprint

inline uint64_t Fingerprint(const char* s, size_t length) {
  if (length <= 16) return fingerprint::UpTo16(s, length);
  if (length <= 32) return fingerprint::UpTo32(s, length);
  if (length <= 64) return fingerprint::UpTo64(s, length);
  return fingerprint::Longer(s, length);
}

}  // namespace sok

#endif  // SOK_CORE_FINGERPRINT_H_
