// Hashing: the index shard, the digest and the bucket of a key.
//
// A rank holds only keys with `key % world_size == rank`, so the low bits of its keys are far from
// random. One full-avalanche mix makes all 64 bits usable. Each use takes its own bits:
//
//     63      58                                     7      0
//     |  shard  |                                    |  digest |
//     |  times a random odd number, top bits: the bucket       |
//
// The mix is public, so anybody can construct keys with equal hash bits. The bucket therefore also
// depends on a random multiplier that each process draws (multiply-shift hashing). Nobody who does
// not know it can construct keys that share a bucket. It affects only where keys lie in an index,
// never a result: not owners, shards, row numbers, initial rows, exports or files.
#ifndef SOK_CORE_HASH_H_
#define SOK_CORE_HASH_H_

#include <cstddef>
#include <cstdint>
#include <random>

#include "cpp/core/platform.h"

namespace sok {

inline constexpr int kShardBits = 6;
inline constexpr int kNumShards = 1 << kShardBits;

inline constexpr uint32_t kNoRow = 0xFFFFFFFFu;  // in place of a missing key's row number

// Digests of slots without a key, in the device's index. No key value is reserved, so every 64-bit
// key is legal.
inline constexpr uint8_t kEmptyDigest = 0;
inline constexpr uint8_t kErasedDigest = 1;

// A bijection on 64 bits: equal hashes mean equal keys. The shifts and factors are those of
// SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
// 2014; variant 13 of D. Stafford's search).
SOK_HD inline uint64_t HashKey(uint64_t key) {
  key ^= key >> 30;
  key *= 0xBF58476D1CE4E5B9ull;
  key ^= key >> 27;
  key *= 0x94D049BB133111EBull;
  return key ^ (key >> 31);
}

SOK_HD inline uint32_t HashShard(uint64_t hash) {
  return static_cast<uint32_t>(hash >> (64 - kShardBits));
}
SOK_HD inline uint8_t HashDigest(uint64_t hash) {
  const uint8_t low = static_cast<uint8_t>(hash);
  return low < 2 ? low + 2 : low;  // 2..255
}

// Odd, drawn once per process.
inline uint64_t ProcessMultiplier() {
  static const uint64_t multiplier = [] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
  }();
  return multiplier;
}

// Maps a hash to the first of 2^n places that a probe visits. Over all multipliers, two different
// hashes share it with a probability of at most 2^(1 - n) (M. Dietzfelbinger et al., "A reliable
// randomized algorithm for the closest-pair problem", 1997).
struct ProbeHome {
  uint64_t multiplier = 1;
  int shift = 63;  // 63 - n; at first n = 0, one place

  static ProbeHome Of(uint64_t num_places, uint64_t multiplier = ProcessMultiplier()) {
    ProbeHome home{multiplier, 63};
    for (; num_places > 1; num_places /= 2) --home.shift;
    return home;
  }
  // Two shifts, since a shift by 64 is undefined.
  SOK_HD uint64_t operator()(uint64_t hash) const { return (hash * multiplier >> 1) >> shift; }
};

// The same for any number of places, of which it scales the product to: for 2^n the same place. For
// others the bound above is twice as large.
inline uint64_t ScaledHome(uint64_t hash, uint64_t multiplier, uint64_t num_places) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>(static_cast<Wide>(hash * multiplier) * num_places >> 64);
}

// Hash of a table's name, part of the seed of its initial rows (FNV-1a, then the mix above).
inline uint64_t HashName(const char* name, size_t length) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (size_t i = 0; i < length; ++i) {
    hash = (hash ^ static_cast<uint8_t>(name[i])) * 0x100000001B3ull;
  }
  return HashKey(hash);
}

}  // namespace sok

#endif  // SOK_CORE_HASH_H_
