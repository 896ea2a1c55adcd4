// Index: one shard's map from key to row number.
//
//     hash -> bucket (ScaledHome) -> next bucket -> ...      stops at a bucket with an empty slot
//
// Open addressing over an array of buckets, 2^n or 3 * 2^n of them. A key sits in the first free
// slot that its probe met, so every bucket before it was full at the time. Erasing from a bucket
// that has an empty slot leaves an empty slot; from any other, a slot marked erased, so that probes
// for keys further on do not stop early.
//
// Invariant: keys + erased slots <= limit <= 3/4 of all slots, so every probe ends. The array doubles
// when a new key would break that, or is rehashed at its size when erased slots are to blame. Rows
// stay where they are: only the index moves.
//
// The shards of a table have as many keys each. They grow at different loads, else all would grow
// within a few batches, which would take many times as long as the others. The range is wider where
// the arrays are large, and every other shard has arrays of 3 * 2^n buckets: then nearly every batch
// has its share.
//
//     load    5/8 |---- shard 63 ---- ... ---- shard 1 ---- shard 0 | 3/4     small arrays
//            9/16 |-------- shard 63 ------ ... ------- shard 0 ----| 3/4     from 1 MiB on
//
//     keys of a shard   2^n |= even shards =|  |====== odd shards ======| 2^(n+1)     from 1 MiB on
//
// To double a large array takes many times as long as a batch: the system clears the new memory, and
// all keys move. So before that, the last sixteenth of the keys that it holds brings the next array piece
// by piece (MoveAhead). Homes are the top bits of a product, so keys keep their order:
//
//     array       | moved, in both arrays | only here                 |     probes read this one
//     next array  | twice as many buckets | not touched yet           |
//
// Whatever is inserted into a moved bucket, or erased from one, is also in the next array. The last
// piece moves when the array has no more room, and the next one takes its place.
//
// Cost: 12.8 bytes per slot, 17 to 46 per key between two doublings; 1.01 buckets per find at a load
// of 3/8, 1.2 at 3/4. Nothing is allocated before the first key. Not thread-safe by itself; the
// table's lock covers it.
#ifndef SOK_CORE_CPU_INDEX_H_
#define SOK_CORE_CPU_INDEX_H_

#include <cstdint>

#include "cpp/core/cpu/memory.h"
#include "cpp/core/hash.h"

namespace sok {

// Bucket: five slots probed together, one cache line.
//
//     byte 0                40                   60     61       64
//     | 5 keys, 8 bytes     | 5 row numbers, 4   | used | erased | unused
//
// Most probes end in their first bucket. They cost one cache miss, for present and for missing keys.
// A probe compares the five keys themselves, which takes less time than a second cache line, so
// there are no digests. Bit s of `used` says that slot s holds a key. Bit s of `erased` says that it
// held one, so that probes must go on. With neither bit the slot is empty.
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
  uint8_t unused;  // to write to, so that the system brings a page
};
static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

class Index {
 public:
  static constexpr uint32_t kMissing = 0xFFFFFFFFu;

  Index() : Index(ProcessMultiplier()) {}
  explicit Index(uint64_t multiplier) { array_.multiplier = multiplier; }

  int64_t size() const { return size_; }
  int64_t num_buckets() const {
    return array_.buckets == &kNoKeys ? 0 : static_cast<int64_t>(array_.num_buckets);
  }
  int64_t capacity() const { return limit_; }  // keys that fit before it grows
  int64_t bytes() const {
    return (num_buckets() + 2 * moved_) * static_cast<int64_t>(sizeof(Bucket));
  }

  // Changes when keys move to other buckets.
  uint64_t layout() const { return layout_; }

  // Takes larger arrays from a pool shared with other shards. Before the first key.
  void UsePool(BlockPool* pool) { array_.pool = pool; }

  // Grows at a load of `parts` / kLoadParts, at least 5/8 and at most 3/4; a large array at a lower
  // one (GrowthLoad). What MakeRoom was asked for in advance fits without. Before the first key.
  static constexpr int kLoadParts = 512;
  void GrowAt(int parts, int64_t first_buckets = 1) {
    grow_at_ = parts;
    first_buckets_ = first_buckets;
  }
  // As in the drawing above.
  void GrowAsShard(int shard) {
    GrowAt(kLoadParts * 3 / 4 - shard * kLoadParts / 8 / kNumShards, shard % 2 == 0 ? 1 : 3);
  }

  // Where the probe of a key begins. Never null: an empty index shows one bucket without keys.
  const Bucket* Home(uint64_t hash) const { return array_.Home(hash); }

  uint32_t Find(uint64_t hash, uint64_t key) const { return FindFrom(Home(hash), key); }
  // The same from a bucket that a pipelined caller has already computed (and prefetched).
  uint32_t FindFrom(const Bucket* bucket, uint64_t key) const {
    for (;;) {
      const uint32_t match = bucket->Match(key);
      if (match != 0) return bucket->rows[__builtin_ctz(match)];
      if (bucket->Empty() != 0) return kMissing;
      bucket = array_.Next(bucket);
    }
  }

  // Makes room for `num_keys` keys beyond those present. Throws std::bad_alloc, changing nothing.
  void MakeRoom(int64_t num_keys);
  bool HasRoom(int64_t num_keys) const { return size_ + array_.erased + num_keys <= limit_; }
  // Whether a large array is about to double: then, before `num_keys` keys are inserted, MoveAhead
  // moves their share of its buckets.
  bool IsAboutToDouble(int64_t num_keys) const {
    return num_buckets() >= kMovedAhead && !is_reserved_ &&
           size_ + num_keys > limit_ - limit_ / kLastPart;
  }
  void MoveAhead(int64_t num_keys) noexcept;

  // Returns the row number of a present key, or inserts the key with `row` and returns that.
  // MakeRoom must have made room.
  uint32_t FindOrInsert(uint64_t hash, uint64_t key, uint32_t row) noexcept;

  // Returns the row number that the key had, or kMissing.
  uint32_t Erase(uint64_t hash, uint64_t key) noexcept;

  void Clear() noexcept;
  void Swap(Index& other) noexcept;

  // fn(key, row number), in slot order.
  template <typename Fn>
  void ForEach(const Fn& fn) const {
    ForEachIn(0, num_buckets(), fn);
  }
  // The same of buckets [begin, end).
  template <typename Fn>
  void ForEachIn(int64_t begin, int64_t end, const Fn& fn) const {
    for (int64_t b = begin; b < end; ++b) {
      const Bucket& bucket = array_.buckets[b];
      for (uint32_t used = bucket.used; used != 0; used &= used - 1) {
        const int slot = __builtin_ctz(used);
        fn(bucket.keys[slot], bucket.rows[slot]);
      }
    }
  }

  // Adds the probe length of every key to *total and raises *longest.
  void AddProbeLengths(int64_t* total, int64_t* longest) const;

 private:
  static constexpr int64_t MaxUsed(int64_t num_buckets) {
    return num_buckets * Bucket::kSlots * 3 / 4;
  }
  static constexpr int64_t kMovedAhead = 1 << 14;  // buckets, 1 MiB
  static constexpr int64_t kLastPart = 16;

  static const Bucket kNoKeys;

  // Buckets, and how to find a key's. They come from the pool where that pays, else from the heap.
  struct Array {
    Array() = default;
    Array(int64_t num_buckets, const Array& like);  // with its multiplier and its pool
    ~Array() { Free(); }
    Array(const Array&) = delete;
    void Free() noexcept;
    void Swap(Array& other) noexcept;

    Bucket* Home(uint64_t hash) const {
      return buckets + ScaledHome(hash, multiplier, num_buckets);
    }
    Bucket* Next(const Bucket* bucket) const {
      const uint64_t next = static_cast<uint64_t>(bucket - buckets) + 1;
      return buckets + (next == num_buckets ? 0 : next);
    }
    // The key must not be there.
    void Add(uint64_t hash, uint64_t key, uint32_t row) noexcept;
    // Its row number, or kMissing. Sets *position to that of its bucket.
    uint32_t Remove(uint64_t hash, uint64_t key, int64_t* position) noexcept;

    Bucket* buckets = const_cast<Bucket*>(&kNoKeys);  // never written while it is this one
    uint64_t num_buckets = 1;
    uint64_t multiplier = 1;
    int64_t erased = 0;  // slots
    BlockPool* pool = nullptr;
    size_t pooled_bytes = 0;  // of a small block
    Memory memory;
  };

  int64_t GrowthLoad(int64_t num_buckets) const {
    const int below = kLoadParts * 3 / 4 - grow_at_;
    return grow_at_ - (num_buckets >= kMovedAhead ? below / 2 : 0);
  }
  void Rehash(int64_t num_buckets);              // sets the limit at which it grows
  void MoveTo(Array* to, int64_t end) noexcept;  // buckets [moved_, end)
  void DropNext() noexcept;

  Array array_;
  Array next_;         // twice as large; without buckets unless keys move ahead
  int64_t moved_ = 0;  // buckets whose keys next_ has, too
  uint64_t layout_ = 0;
  int64_t size_ = 0;
  int64_t limit_ = 0;         // of keys and erased slots
  bool is_reserved_ = false;  // the limit is what MakeRoom was asked for: no more may follow
  int grow_at_ = kLoadParts * 3 / 4;
  int64_t first_buckets_ = 1;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_INDEX_H_
