// Bucket: 16 slots probed together.
//
//     byte 0          16                                                 208
//     | 16 digests    | 16 entries: key, 8 bytes | row number, 4 bytes    |
//
// A digest is a byte: 0 empty, 1 erased, 2..255 eight bits of the key's hash. One vector compare
// tells which of the 16 slots may hold a key; only those entries are read. So a probe for a missing
// key costs one cache line, and for a present one two on average: a key and its row number lie side
// by side. 208 bytes are 13 times 16: digests never straddle a cache line.
#ifndef SOK_CORE_CPU_BUCKET_H_
#define SOK_CORE_CPU_BUCKET_H_

#include <cstdint>
#include <cstring>

#include "cpp/core/digest.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sok {

// Packed: with padding a bucket would be 272 bytes. One entry in eight lies on two cache lines.
struct [[gnu::packed, gnu::aligned(4)]] Entry {
  uint64_t key;
  uint32_t row;
};

struct alignas(16) Bucket {
  uint8_t digests[kBucketSlots];
  Entry entries[kBucketSlots];
};
static_assert(sizeof(Bucket) == 208, "a bucket has no padding");

// The 16 digests of a bucket. Match(d) has bit i set where digest i equals d.
// Plain 64-bit code; little-endian, as is every CPU this is built for.
class PlainDigests {
 public:
  explicit PlainDigests(const uint8_t* digests) {
    std::memcpy(&words_.low, digests, 8);
    std::memcpy(&words_.high, digests + 8, 8);
  }
  uint32_t Match(uint8_t digest) const { return MatchDigests(words_, digest); }

 private:
  DigestWords words_;
};

#if defined(__SSE2__)

class Digests {
 public:
  explicit Digests(const uint8_t* digests)
      : bytes_(_mm_load_si128(reinterpret_cast<const __m128i*>(digests))) {}
  uint32_t Match(uint8_t digest) const {
    const __m128i equal = _mm_cmpeq_epi8(bytes_, _mm_set1_epi8(static_cast<char>(digest)));
    return static_cast<uint32_t>(_mm_movemask_epi8(equal));
  }

 private:
  __m128i bytes_;
};

#elif defined(__ARM_NEON) && defined(__aarch64__)

class Digests {
 public:
  explicit Digests(const uint8_t* digests) : bytes_(vld1q_u8(digests)) {}
  uint32_t Match(uint8_t digest) const {
    static const uint8_t kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vandq_u8(vceqq_u8(bytes_, vdupq_n_u8(digest)), vld1q_u8(kBits));
    return vaddv_u8(vget_low_u8(bits)) | static_cast<uint32_t>(vaddv_u8(vget_high_u8(bits))) << 8;
  }

 private:
  uint8x16_t bytes_;
};

#else

using Digests = PlainDigests;

#endif

}  // namespace sok

#endif  // SOK_CORE_CPU_BUCKET_H_
