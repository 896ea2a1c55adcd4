// LocalTable: which keys of a small batch are equal.
#ifndef SOK_CORE_CPU_LOCAL_TABLE_H_
#define SOK_CORE_CPU_LOCAL_TABLE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/hash.h"

namespace sok {

// Full-avalanche mix of a key, independent of its index shard (hash.h).
inline uint64_t MixKey(uint64_t key) {
  key ^= key >> 32;
  key *= 0xd6e8feb86659fd93ull;
  key ^= key >> 32;
  key *= 0xd6e8feb86659fd93ull;
  return key ^ (key >> 32);
}

// Smallest power of two >= n.
inline int64_t PowerOfTwoAtLeast(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Local ids of one partition's keys; a thread reuses one for all its partitions.
class LocalTable {
 public:
  // Gives keys[k] the id local_ids[k] in order of first occurrence, and writes the unique keys to
  // unique[0..result). `unique` may be `keys` itself: its write position never passes the reads.
  int32_t Run(const uint64_t* keys, int64_t num_keys, uint64_t* unique, int32_t* local_ids) {
    const int64_t capacity = std::max<int64_t>(16, PowerOfTwoAtLeast(2 * num_keys));
    if (capacity > capacity_) {
      ids_ = Scratch<uint32_t>(capacity);
      capacity_ = capacity;
    }
    uint32_t* const ids = ids_.get();  // local id + 1, 0 when free
    std::memset(ids, 0, capacity * sizeof(uint32_t));
    const uint64_t mask = static_cast<uint64_t>(capacity - 1);
    const ProbeHome home = ProbeHome::Of(mask + 1);
    uint32_t num_unique = 0;
    for (int64_t k = 0; k < num_keys; ++k) {
      const uint64_t key = keys[k];
      uint64_t place = home(MixKey(key));
      // New or seen is a coin toss to the branch predictor, so both take the same path: the key is
      // written behind the unique ones, and stays there if its place turns out to be free. Only a
      // collision branches.
      unique[num_unique] = key;
      for (;;) {
        const uint32_t id = ids[place];
        const bool is_free = id == 0;
        const uint32_t candidate = is_free ? num_unique : id - 1;
        if (__builtin_expect(unique[candidate] == key, 1)) {
          ids[place] = candidate + 1;
          local_ids[k] = static_cast<int32_t>(candidate);
          num_unique += is_free;
          break;
        }
        place = (place + 1) & mask;
      }
    }
    return static_cast<int32_t>(num_unique);
  }

 private:
  Scratch<uint32_t> ids_;
  int64_t capacity_ = 0;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_LOCAL_TABLE_H_
