// Bucket of the device index: 16 slots probed together.
//
//     byte 0          16                          144                    208
//     | 16 digests    | 16 keys, 8 bytes each     | 16 row numbers, 4 each |
//
// A slot's digest byte is its state: 0 empty, 1 erased, 2..255 claimed by a key with that digest.
// Keys are never compared with a sentinel, so every 64-bit key is legal. A row number is stored
// plus one; 0 means that the slot has no row, or that the thread that claimed it has not published
// one yet. A bucket of zeros is an empty bucket.
//
// The digests tell which slots may hold a key before any key is read. Sixteen of them are compared
// with one in plain 64-bit arithmetic, the same on host and device.
//
// Compiled by host compilers too: includes nothing of CUDA.
#ifndef SOK_CORE_CUDA_INDEX_BUCKET_H_
#define SOK_CORE_CUDA_INDEX_BUCKET_H_

#include <cstdint>

#include "cpp/core/hash.h"

namespace sok {
namespace cuda {

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

struct alignas(16) Bucket {
  uint32_t digests[kBucketSlots / 4];  // slot s is byte s % 4 of word s / 4
  uint64_t keys[kBucketSlots];
  uint32_t rows[kBucketSlots];  // row number + 1
};
static_assert(sizeof(Bucket) == 208, "a bucket has no padding");

// What a probe needs of the index. Trivially copyable.
struct IndexRef {
  Bucket* buckets = nullptr;
  uint64_t mask = 0;  // number of buckets - 1, which is a power of two - 1
  ProbeHome home;

  IndexRef() = default;
  IndexRef(Bucket* first, int64_t num_buckets)
      : buckets(first),
        mask(static_cast<uint64_t>(num_buckets) - 1),
        home(ProbeHome::Of(mask + 1)) {}
  SOK_HD Bucket* Home(uint64_t hash) const { return buckets + home(hash); }
  // The next bucket of a probe: 1 further, then 2, then 3. This reaches every bucket, because their
  // number is a power of two, and full neighbours do not form clusters: at a load factor of 0.95 a
  // new key visits 5 buckets, with steps of 1 it would visit 13. `step`: 0 at the home bucket.
  SOK_HD Bucket* Next(const Bucket* bucket, uint64_t* step) const {
    *step += 1;
    return buckets + ((static_cast<uint64_t>(bucket - buckets) + *step) & mask);
  }
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_INDEX_BUCKET_H_
