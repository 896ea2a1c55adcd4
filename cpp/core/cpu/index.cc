#include "cpp/core/cpu/index.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace sok {

namespace {

// Smaller arrays are cheap whatever page they lie on.
constexpr size_t kPoolFrom = size_t{128} << 10;

}  // namespace

const Bucket Index::kNoKeys = {};

Index::Array::Array(int64_t num_buckets, const Array& like)
    : num_buckets(static_cast<uint64_t>(num_buckets)),
      multiplier(like.multiplier),
      pool(like.pool) {
  const size_t bytes = static_cast<size_t>(num_buckets) * sizeof(Bucket);
  bool is_zeroed = true;
  if (pool != nullptr && bytes >= kPoolFrom && bytes % kHugePageBytes != 0) {
    buckets = static_cast<Bucket*>(pool->Allocate(bytes));
    pooled_bytes = bytes;
    return;
  }
  const bool huge = bytes >= kHugePageBytes;
  memory = huge && pool != nullptr ? pool->Take(bytes, &is_zeroed) : Memory(bytes, huge);
  buckets = static_cast<Bucket*>(memory.data());
  if (!is_zeroed) std::memset(memory.data(), 0, bytes);
}

void Index::Array::Free() noexcept {
  if (pooled_bytes > 0) {
    pool->Free(buckets, pooled_bytes);
  } else if (pool != nullptr && memory.bytes() >= kHugePageBytes) {
    pool->Give(std::move(memory));
  }
  memory.Free();
  pooled_bytes = 0;
  buckets = const_cast<Bucket*>(&kNoKeys);
  num_buckets = 1;
  erased = 0;
}

void Index::Array::Swap(Array& other) noexcept {
  std::swap(buckets, other.buckets);
  std::swap(num_buckets, other.num_buckets);
  std::swap(multiplier, other.multiplier);
  std::swap(erased, other.erased);
  std::swap(pool, other.pool);
  std::swap(pooled_bytes, other.pooled_bytes);
  std::swap(memory, other.memory);
}

void Index::Array::Add(uint64_t hash, uint64_t key, uint32_t row) noexcept {
  Bucket* bucket = Home(hash);
  while (bucket->used == Bucket::kAll) bucket = Next(bucket);
  const int slot = __builtin_ctz(~uint32_t{bucket->used});
  erased -= (bucket->erased >> slot) & 1;
  bucket->Put(slot, key, row);
}

uint32_t Index::Array::Remove(uint64_t hash, uint64_t key, int64_t* position) noexcept {
  Bucket* bucket = Home(hash);
  for (;;) {
    const uint32_t match = bucket->Match(key);
    const bool has_empty = bucket->Empty() != 0;
    if (match != 0) {
      bucket->used = static_cast<uint8_t>(bucket->used & ~match);
      if (!has_empty) {
        bucket->erased = static_cast<uint8_t>(bucket->erased | match);
        ++erased;
      }
      *position = bucket - buckets;
      return bucket->rows[__builtin_ctz(match)];
    }
    if (has_empty) return kMissing;
    bucket = Next(bucket);
  }
}

void Index::Swap(Index& other) noexcept {
  array_.Swap(other.array_);
  next_.Swap(other.next_);
  std::swap(moved_, other.moved_);
  std::swap(size_, other.size_);
  std::swap(limit_, other.limit_);
  std::swap(is_reserved_, other.is_reserved_);
}

void Index::MakeRoom(int64_t num_keys) {
  if (HasRoom(num_keys)) return;
  const int64_t wanted = size_ + num_keys, before = num_buckets();
  int64_t num_buckets = std::max(before, first_buckets_);
  // Rehashing at the same size pays only if it frees a good part of the slots, at 5/8 one in eight.
  // Otherwise a table where keys come and go would be rehashed again and again.
  const int64_t most = std::min<int64_t>(GrowthLoad(before), kLoadParts * 5 / 8);
  const bool same_size = before > 0 && wanted <= before * Bucket::kSlots * most / kLoadParts;
  if (before > 0 && !same_size) num_buckets *= 2;
  while (wanted > MaxUsed(num_buckets)) num_buckets *= 2;
  if (!same_size || wanted + array_.erased > MaxUsed(num_buckets)) Rehash(num_buckets);
  is_reserved_ = !same_size && wanted > limit_;
  limit_ = same_size ? MaxUsed(num_buckets) : std::max(limit_, wanted);
}

void Index::MoveAhead(int64_t num_keys) noexcept {
  const int64_t num_buckets = this->num_buckets();
  if (next_.buckets == &kNoKeys) {
    try {
      Array(2 * num_buckets, array_).Swap(next_);
    } catch (const std::bad_alloc&) {
      return;  // there may be enough when it is needed
    }
  }
  const int64_t room = std::max<int64_t>(0, limit_ - size_ - num_keys);
  const double left = std::min(1.0, static_cast<double>(room) / (limit_ / kLastPart));
  MoveTo(&next_, num_buckets - static_cast<int64_t>(left * static_cast<double>(num_buckets)));
}

void Index::MoveTo(Array* to, int64_t end) noexcept {
  // Written before it is read, a page is brought at once; read, the system shows a page of zeros first.
  constexpr int64_t kPageBuckets = 4096 / sizeof(Bucket);
  const int64_t times = static_cast<int64_t>(to->num_buckets) / std::max<int64_t>(1, num_buckets());
  for (int64_t b = times * moved_; b < times * end; b += kPageBuckets) {
    static_cast<volatile uint8_t&>(to->buckets[b].unused) = 0;
  }
  ForEachIn(moved_, end, [to](uint64_t key, uint32_t row) { to->Add(HashKey(key), key, row); });
  moved_ = std::max(moved_, end);
}

void Index::DropNext() noexcept {
  next_.Free();
  moved_ = 0;
}

void Index::Rehash(int64_t num_buckets) {
  Array array;
  if (next_.buckets != &kNoKeys && num_buckets == 2 * this->num_buckets()) {
    array.Swap(next_);
  } else {
    DropNext();  // before there is another one
    Array(num_buckets, array_).Swap(array);
  }
  MoveTo(&array, this->num_buckets());
  moved_ = 0;
  array_.Swap(array);  // the old buckets go with `array`
  ++layout_;
  limit_ = num_buckets * Bucket::kSlots * GrowthLoad(num_buckets) / kLoadParts;
}

uint32_t Index::FindOrInsert(uint64_t hash, uint64_t key, uint32_t row) noexcept {
  Bucket* bucket = array_.Home(hash);
  Bucket* free_bucket = nullptr;  // the first with a slot for a new key
  for (;;) {
    const uint32_t match = bucket->Match(key);
    if (match != 0) return bucket->rows[__builtin_ctz(match)];
    if (free_bucket == nullptr && bucket->used != Bucket::kAll) free_bucket = bucket;
    if (bucket->Empty() != 0) break;
    bucket = array_.Next(bucket);
  }
  const int slot = __builtin_ctz(~uint32_t{free_bucket->used});
  array_.erased -= (free_bucket->erased >> slot) & 1;
  free_bucket->Put(slot, key, row);
  ++size_;
  if (free_bucket - array_.buckets < moved_) next_.Add(hash, key, row);
  return row;
}

uint32_t Index::Erase(uint64_t hash, uint64_t key) noexcept {
  int64_t position, unused;
  const uint32_t row = array_.Remove(hash, key, &position);
  if (row == kMissing) return row;
  --size_;
  if (position < moved_) next_.Remove(hash, key, &unused);
  if (size_ + next_.erased > limit_) DropNext();  // its probes would become long
  return row;
}

void Index::Clear() noexcept {
  array_.Free();
  DropNext();
  size_ = 0;
  limit_ = 0;
}

void Index::AddProbeLengths(int64_t* total, int64_t* longest) const {
  for (int64_t b = 0; b < num_buckets(); ++b) {
    const Bucket& bucket = array_.buckets[b];
    for (uint32_t used = bucket.used; used != 0; used &= used - 1) {
      const int64_t home = array_.Home(HashKey(bucket.keys[__builtin_ctz(used)])) - array_.buckets;
      const int64_t length = (b >= home ? b : b + num_buckets()) - home + 1;
      *total += length;
      *longest = std::max(*longest, length);
    }
  }
}

}  // namespace sok
