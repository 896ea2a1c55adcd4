// Compares sixteen digests with one in plain 64-bit arithmetic, the same on host and device.
//
// A bucket has 16 slots, each with one byte of its key's hash, the digest (see hash.h). The digests
// tell which slots may hold a key before any key is read.
#ifndef SOK_CORE_CUDA_INDEX_DIGEST_H_
#define SOK_CORE_CUDA_INDEX_DIGEST_H_

#include <cstdint>

#include "cpp/core/platform.h"

namespace sok {

inline constexpr int kBucketSlots = 16;

// Bit i is set where byte i of `bytes` (0 is the lowest) equals `digest`.
SOK_HD inline uint32_t MatchEight(uint64_t bytes, uint8_t digest) {
  constexpr uint64_t kLow7 = 0x7F7F7F7F7F7F7F7Full;
  const uint64_t x = bytes ^ (0x0101010101010101ull * digest);  // 0 where equal
  const uint64_t zero = ~(((x & kLow7) + kLow7) | x | kLow7);   // 0x80 where 0, exactly
  return static_cast<uint32_t>(((zero >> 7) * 0x0102040810204080ull) >> 56);  // one bit per byte
}

// The 16 digests of a bucket as two words, slot 0 in the lowest byte of `low`.
struct DigestWords {
  uint64_t low;
  uint64_t high;
};

SOK_HD inline uint32_t MatchDigests(const DigestWords& digests, uint8_t digest) {
  return MatchEight(digests.low, digest) | MatchEight(digests.high, digest) << 8;
}

}  // namespace sok

#endif  // SOK_CORE_CUDA_INDEX_DIGEST_H_
