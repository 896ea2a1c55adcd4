#include "cpp/core/cpu/index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cpp/core/cpu/scratch.h"

namespace sok {

namespace {

// Smaller arrays are cheap whatever page they lie on; larger ones fill huge pages by themselves.
constexpr size_t kPoolFrom = size_t{128} << 10;
constexpr size_t kPoolBelow = size_t{16} << 20;

}  // namespace

const Bucket Index::kNoKeys = {};

Index::Array::Array(int64_t num_buckets, BlockPool* array_pool) : pool(array_pool) {
  const size_t bytes = static_cast<size_t>(num_buckets) * sizeof(Bucket);
  if (pool != nullptr && bytes >= kPoolFrom && bytes < kPoolBelow) {
    buckets = static_cast<Bucket*>(pool->Allocate(bytes));
    pooled_bytes = bytes;
  } else {
    memory = Memory(bytes, bytes >= kPoolBelow);
    buckets = static_cast<Bucket*>(memory.data());
  }
}

void Index::Array::Free() noexcept {
  if (pooled_bytes > 0) pool->Free(buckets, pooled_bytes);
  memory.Free();
  pooled_bytes = 0;
  buckets = nullptr;
}

void Index::Array::Swap(Array& other) noexcept {
  std::swap(buckets, other.buckets);
  std::swap(pool, other.pool);
  std::swap(pooled_bytes, other.pooled_bytes);
  std::swap(memory, other.memory);
}

void Index::Swap(Index& other) noexcept {
  std::swap(buckets_, other.buckets_);
  std::swap(mask_, other.mask_);
  std::swap(home_, other.home_);
  std::swap(size_, other.size_);
  std::swap(erased_, other.erased_);
  array_.Swap(other.array_);
}

void Index::MakeRoom(int64_t num_keys) {
  if (HasRoom(num_keys)) return;
  int64_t num_buckets = this->num_buckets();
  if (num_buckets == 0) {
    num_buckets = 1;
  } else if (size_ + num_keys > num_buckets * kBucketSlots / 4 * 3) {
    // Rehashing at the same size pays only if it frees a good part of the slots: at 3/4 one in
    // eight, so that a table where keys come and go is not rehashed at every insert.
    num_buckets *= 2;
  }
  while (size_ + num_keys > MaxUsed(num_buckets)) num_buckets *= 2;
  Rehash(num_buckets);
}

void Index::Rehash(int64_t num_buckets) {
  Array array(num_buckets, array_.pool);
  // Slots fill in order, so a count says which is next. The digests say it too, but a vector read
  // just behind the byte written last has to wait for it.
  const Scratch<uint8_t> used(num_buckets);
  std::memset(used.get(), 0, static_cast<size_t>(num_buckets));
  uint8_t* const counts = used.get();
  Bucket* const buckets = array.buckets;
  const uint64_t mask = static_cast<uint64_t>(num_buckets) - 1;
  const ProbeHome home = ProbeHome::Of(mask + 1, home_.multiplier);
  ForEach([counts, buckets, mask, home](uint64_t key, uint32_t row) {
    const uint64_t hash = HashKey(key);
    uint64_t b = home(hash);
    while (counts[b] == kBucketSlots) b = (b + 1) & mask;
    const int slot = counts[b]++;
    buckets[b].digests[slot] = HashDigest(hash);
    buckets[b].entries[slot] = {key, row};
  });
  array_.Swap(array);  // the old buckets go with `array`
  buckets_ = buckets;
  mask_ = mask;
  home_ = home;
  erased_ = 0;
}

uint32_t Index::FindOrInsert(uint64_t hash, uint64_t key, uint32_t row) noexcept {
  const uint8_t digest = HashDigest(hash);
  Bucket* bucket = const_cast<Bucket*>(Home(hash));
  Bucket* free_bucket = nullptr;
  int free_slot = 0;
  for (;;) {
    const Digests digests(bucket->digests);
    for (uint32_t match = digests.Match(digest); match != 0; match &= match - 1) {
      const int slot = __builtin_ctz(match);
      if (bucket->entries[slot].key == key) return bucket->entries[slot].row;
    }
    const uint32_t empty = digests.Match(kEmptyDigest);
    if (free_bucket == nullptr) {
      const uint32_t free = empty | (erased_ == 0 ? 0 : digests.Match(kErasedDigest));
      if (free != 0) {
        free_bucket = bucket;
        free_slot = __builtin_ctz(free);
      }
    }
    if (empty != 0) break;
    bucket = const_cast<Bucket*>(Next(bucket));
  }
  if (free_bucket->digests[free_slot] == kErasedDigest) --erased_;
  free_bucket->digests[free_slot] = digest;
  free_bucket->entries[free_slot] = {key, row};
  ++size_;
  return row;
}

uint32_t Index::Erase(uint64_t hash, uint64_t key) noexcept {
  const uint8_t digest = HashDigest(hash);
  Bucket* bucket = const_cast<Bucket*>(Home(hash));
  for (;;) {
    const Digests digests(bucket->digests);
    const uint32_t empty = digests.Match(kEmptyDigest);
    for (uint32_t match = digests.Match(digest); match != 0; match &= match - 1) {
      const int slot = __builtin_ctz(match);
      if (bucket->entries[slot].key != key) continue;
      bucket->digests[slot] = empty != 0 ? kEmptyDigest : kErasedDigest;
      if (empty == 0) ++erased_;
      --size_;
      return bucket->entries[slot].row;
    }
    if (empty != 0) return kMissing;
    bucket = const_cast<Bucket*>(Next(bucket));
  }
}

void Index::Clear() noexcept {
  array_.Free();
  buckets_ = const_cast<Bucket*>(&kNoKeys);
  mask_ = 0;
  home_ = ProbeHome::Of(1, home_.multiplier);
  size_ = 0;
  erased_ = 0;
}

void Index::AddProbeLengths(int64_t* total, int64_t* longest) const {
  for (int64_t b = 0; b < num_buckets(); ++b) {
    for (uint32_t used = Used(buckets_[b]); used != 0; used &= used - 1) {
      const uint64_t home = home_(HashKey(buckets_[b].entries[__builtin_ctz(used)].key));
      const int64_t length = static_cast<int64_t>((static_cast<uint64_t>(b) - home) & mask_) + 1;
      *total += length;
      *longest = std::max(*longest, length);
    }
  }
}

}  // namespace sok
