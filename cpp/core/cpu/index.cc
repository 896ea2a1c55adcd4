#include "cpp/core/cpu/index.h"

#include <algorithm>
#include <new>
#include <utility>

namespace sok {

namespace {

// Smaller arrays are cheap whatever page they lie on; larger ones fill huge pages by themselves.
constexpr size_t kPoolFrom = size_t{128} << 10;
constexpr size_t kPoolBelow = size_t{16} << 20;
constexpr int64_t kPageBytes = 4096;

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
  std::swap(limit_, other.limit_);
  array_.Swap(other.array_);
  next_.Swap(other.next_);
  std::swap(next_touched_, other.next_touched_);
}

void Index::MakeRoom(int64_t num_keys) {
  if (HasRoom(num_keys)) return;
  const int64_t wanted = size_ + num_keys, before = num_buckets();
  int64_t num_buckets = std::max<int64_t>(before, 1);
  // Rehashing at the same size pays only if it frees a good part of the slots, at 5/8 one in eight.
  // Otherwise a table where keys come and go would be rehashed again and again.
  const bool same_size = before > 0 && wanted <= before * Bucket::kSlots * 5 / 8;
  if (before > 0 && !same_size) num_buckets *= 2;
  while (wanted > MaxUsed(num_buckets)) num_buckets *= 2;
  if (!same_size || wanted + erased_ > MaxUsed(num_buckets)) Rehash(num_buckets);
  limit_ = same_size ? MaxUsed(num_buckets) : std::max(limit_, wanted);
}

void Index::TouchAhead(int64_t num_keys) noexcept {
  if (next_.buckets == nullptr) {
    try {
      Array(2 * num_buckets(), array_.pool).Swap(next_);
    } catch (const std::bad_alloc&) {
      return;  // there may be enough when it is needed
    }
  }
  const int64_t bytes = 2 * num_buckets() * static_cast<int64_t>(sizeof(Bucket));
  const int64_t room = std::max<int64_t>(0, limit_ - size_ - num_keys);
  const double left = std::min(1.0, static_cast<double>(room) / (limit_ / kLastPart));
  const int64_t end = bytes - static_cast<int64_t>(left * static_cast<double>(bytes));
  volatile char* const data = reinterpret_cast<char*>(next_.buckets);
  for (; next_touched_ < end; next_touched_ += kPageBytes) data[next_touched_] = 0;
}

void Index::Rehash(int64_t num_buckets) {
  Array array;
  if (num_buckets > this->num_buckets()) {
    array.Swap(next_);
    next_touched_ = 0;
  }
  if (array.buckets == nullptr || num_buckets != 2 * this->num_buckets()) {
    array.Free();  // before there is another one
    Array(num_buckets, array_.pool).Swap(array);
  }
  Bucket* const buckets = array.buckets;
  const uint64_t mask = static_cast<uint64_t>(num_buckets) - 1;
  const ProbeHome home = ProbeHome::Of(mask + 1, home_.multiplier);
  ForEach([buckets, mask, home](uint64_t key, uint32_t row) {
    uint64_t b = home(HashKey(key));
    while (buckets[b].used == Bucket::kAll) b = (b + 1) & mask;
    buckets[b].Put(__builtin_ctz(buckets[b].Empty()), key, row);
  });
  array_.Swap(array);  // the old buckets go with `array`
  buckets_ = buckets;
  mask_ = mask;
  ++layout_;
  home_ = home;
  erased_ = 0;
  limit_ = num_buckets * Bucket::kSlots * grow_at_ / kLoadParts;
}

uint32_t Index::FindOrInsert(uint64_t hash, uint64_t key, uint32_t row) noexcept {
  Bucket* bucket = const_cast<Bucket*>(Home(hash));
  Bucket* free_bucket = nullptr;  // the first with a slot for a new key
  for (;;) {
    const uint32_t match = bucket->Match(key);
    if (match != 0) return bucket->rows[__builtin_ctz(match)];
    if (free_bucket == nullptr && bucket->used != Bucket::kAll) free_bucket = bucket;
    if (bucket->Empty() != 0) break;
    bucket = const_cast<Bucket*>(Next(bucket));
  }
  const int slot = __builtin_ctz(~uint32_t{free_bucket->used});
  erased_ -= (free_bucket->erased >> slot) & 1;
  free_bucket->Put(slot, key, row);
  ++size_;
  return row;
}

uint32_t Index::Erase(uint64_t hash, uint64_t key) noexcept {
  Bucket* bucket = const_cast<Bucket*>(Home(hash));
  for (;;) {
    const uint32_t match = bucket->Match(key);
    const bool has_empty = bucket->Empty() != 0;
    if (match != 0) {
      bucket->used = static_cast<uint8_t>(bucket->used & ~match);
      if (!has_empty) {
        bucket->erased = static_cast<uint8_t>(bucket->erased | match);
        ++erased_;
      }
      --size_;
      return bucket->rows[__builtin_ctz(match)];
    }
    if (has_empty) return kMissing;
    bucket = const_cast<Bucket*>(Next(bucket));
  }
}

void Index::Clear() noexcept {
  array_.Free();
  next_.Free();
  next_touched_ = 0;
  buckets_ = const_cast<Bucket*>(&kNoKeys);
  mask_ = 0;
  home_ = ProbeHome::Of(1, home_.multiplier);
  size_ = 0;
  erased_ = 0;
  limit_ = 0;
}

void Index::AddProbeLengths(int64_t* total, int64_t* longest) const {
  for (int64_t b = 0; b < num_buckets(); ++b) {
    for (uint32_t used = buckets_[b].used; used != 0; used &= used - 1) {
      const uint64_t home = home_(HashKey(buckets_[b].keys[__builtin_ctz(used)]));
      const int64_t length = static_cast<int64_t>((static_cast<uint64_t>(b) - home) & mask_) + 1;
      *total += length;
      *longest = std::max(*longest, length);
    }
  }
}

}  // namespace sok
