// Counting Bloom filter: the places of a key's counters. They are the same on every device, so one
// device can load the counters of another.
//
//     counters  | shard 0 | shard 1 | ... | shard 63 |      all counters of a key are in the
//                             ^  ^ ^                        part of its index shard (hash.h)
//
// Double hashing: A. Kirsch and M. Mitzenmacher, "Less hashing, same performance", 2006.
//
// Places of one key may coincide. The minimum does not change by that, but counting must skip a
// repeated place (BloomPlaces::IsNew), or the key would be counted twice.
#ifndef SOK_CORE_BLOOM_H_
#define SOK_CORE_BLOOM_H_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/hash.h"
#include "cpp/core/platform.h"
#include "cpp/core/policy.h"

namespace sok {

struct BloomShape {
  int num_hashes = 1;
  int64_t shard_counters = 1;

  int64_t num_counters() const { return shard_counters * kNumShards; }
};

inline BloomShape ShapeOfBloomFilter(const PolicyOptions& options) {
  const BloomSize size = SizeOfBloomFilter(options.bloom_max_keys, options.bloom_probability);
  return {static_cast<int>(size.num_hashes), (size.num_counters + kNumShards - 1) / kNumShards};
}

// The places of one key's counters, by number in [0, num_hashes).
struct BloomPlaces {
  uint64_t begin, size, first, stride;

  SOK_HD BloomPlaces(const BloomShape& shape, uint64_t hash)
      : begin(HashShard(hash) * static_cast<uint64_t>(shape.shard_counters)),
        size(static_cast<uint64_t>(shape.shard_counters)),
        first(HashKey(hash ^ 0x9E3779B97F4A7C15ull)),
        stride(HashKey(hash + 0xD1B54A32D192ED03ull) | 1) {}

  SOK_HD int64_t operator[](int number) const {
    return static_cast<int64_t>(begin + (first + static_cast<uint64_t>(number) * stride) % size);
  }
  SOK_HD bool IsNew(int number) const {
    const int64_t place = (*this)[number];
    for (int i = 0; i < number; ++i) {
      if ((*this)[i] == place) return false;
    }
    return true;
  }
};

// Throws std::invalid_argument naming both sizes, unless `counters` has this filter's size or is
// empty.
inline void CheckBloomCounters(const BloomShape& shape, const std::vector<int64_t>& counters) {
  if (counters.empty() || static_cast<int64_t>(counters.size()) == shape.num_counters()) return;
  throw std::invalid_argument("A Bloom filter must be restored from one of the same size, " +
                              std::to_string(shape.num_counters()) + " counters. Received: " +
                              std::to_string(counters.size()) + " counters");
}

}  // namespace sok

#endif  // SOK_CORE_BLOOM_H_
