// Bucket: five slots probed together, one cache line.
//
//     byte 0                40                   60     61       64
//     | 5 keys, 8 bytes     | 5 row numbers, 4   | used | erased | -
//
// Most probes end in their first bucket. They cost one cache miss, for present and for missing keys.
// A probe compares the five keys themselves, which takes less time than a second cache line, so
// there are no digests. Bit s of `used` says that slot s holds a key. Bit s of `erased` says that it
// held one, so that probes must go on. With neither bit the slot is empty.
#ifndef SOK_CORE_CPU_BUCKET_H_
#define SOK_CORE_CPU_BUCKET_H_

#include <cstdint>

namespace sok {

struct alignas(64) Bucket {
  static constexpr int kSlots = 5;
  static constexpr uint32_t kAll = (1u << kSlots) - 1;

  // The used slots with this key: one bit or none.
  uint32_t Match(uint64_t key) const {
    uint32_t equal = 0;
    for (int s = 0; s < kSlots; ++s) equal |= static_cast<uint32_t>(keys[s] == key) << s;
    return equal & used;
  }
  uint32_t Empty() const { return kAll & ~uint32_t{used} & ~uint32_t{erased}; }

  void Put(int slot, uint64_t key, uint32_t row) {
    keys[slot] = key;
    rows[slot] = row;
    used = static_cast<uint8_t>(used | 1u << slot);
    erased = static_cast<uint8_t>(erased & ~(1u << slot));
  }

  uint64_t keys[kSlots];
  uint32_t rows[kSlots];
  uint8_t used;
  uint8_t erased;
};
static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

}  // namespace sok

#endif  // SOK_CORE_CPU_BUCKET_H_
