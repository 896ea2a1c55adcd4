#include "cpp/core/cpu/route.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpp/core/cpu/local_table.h"

namespace sok {
namespace {

constexpr int64_t kChunkKeys = 16384;     // keys of one histogram
constexpr int64_t kPartitionKeys = 2048;  // aimed at, so that a partition's table fits the L1 cache
constexpr int64_t kMaxHashPartitions = 1024;
// Up to here one table over all keys is faster than a scatter. An owner has one partition, so both
// give the same order.
constexpr int64_t kSerialKeys = 4096;
static_assert(kSerialKeys <= 2 * kPartitionKeys, "two owners or more have one partition each");
constexpr int64_t kCopiedKeys = 16384;  // worth handing to another thread

// key % divisor without a division: with m = ceil(2^128 / d), the fraction (m * key) mod 2^128
// times d has the remainder as its integer part (Lemire, Kaser, Kurz: Faster remainder by direct
// computation, 2019). Exact for all 64-bit keys.
class FastModulo {
 public:
  explicit FastModulo(uint64_t divisor)
      : divisor_(divisor),
        mask_(divisor - 1),
        power_of_two_((divisor & (divisor - 1)) == 0),
        magic_(power_of_two_ ? 0 : ~static_cast<Wide>(0) / divisor + 1) {}

  uint64_t operator()(uint64_t key) const {
    if (power_of_two_) return key & mask_;
    const Wide fraction = magic_ * key;
    const Wide low = static_cast<Wide>(static_cast<uint64_t>(fraction)) * divisor_;
    const Wide high = static_cast<Wide>(static_cast<uint64_t>(fraction >> 64)) * divisor_;
    return static_cast<uint64_t>((high + (low >> 64)) >> 64);
  }

 private:
  __extension__ using Wide = unsigned __int128;
  uint64_t divisor_;
  uint64_t mask_;
  bool power_of_two_;
  Wide magic_;
};

void CheckNumKeys(int64_t num_keys) {
  if (num_keys >= 0 && num_keys <= std::numeric_limits<int32_t>::max()) return;
  throw std::invalid_argument("`num_keys` must be in [0, 2^31). Received: " +
                              std::to_string(num_keys));
}

}  // namespace

void Route::RunSerial(const uint64_t* keys, int64_t world_size, int32_t* inverse) {
  LocalTable table;
  partition_offsets_ = {0, num_keys_};
  if (world_size == 1) {
    const int64_t num_unique = table.Run(keys, num_keys_, scattered_.get(), inverse);
    unique_offsets_ = {0, num_unique};
    owner_offsets_ = unique_offsets_;
    return;
  }
  const Scratch<uint64_t> unique(num_keys_);  // in order of first occurrence
  const int64_t num_unique = table.Run(keys, num_keys_, unique.get(), inverse);
  unique_offsets_ = {0, num_unique};
  owner_offsets_.assign(static_cast<size_t>(world_size) + 1, 0);
  const FastModulo owner_of(static_cast<uint64_t>(world_size));
  for (int64_t u = 0; u < num_unique; ++u) ++owner_offsets_[owner_of(unique[u]) + 1];
  for (int64_t owner = 0; owner < world_size; ++owner) {
    owner_offsets_[owner + 1] += owner_offsets_[owner];
  }
  std::vector<int64_t> next(owner_offsets_);
  const Scratch<int32_t> place(num_unique);
  for (int64_t u = 0; u < num_unique; ++u) {
    place[u] = static_cast<int32_t>(next[owner_of(unique[u])]++);
    scattered_[place[u]] = unique[u];
  }
  for (int64_t i = 0; i < num_keys_; ++i) inverse[i] = place[inverse[i]];
}

void Route::RunPartitioned(Executor& ex, const uint64_t* keys, int64_t world_size,
                           int32_t* inverse) {
  const int64_t per_owner = std::clamp<int64_t>(
      PowerOfTwoAtLeast(num_keys_ / (kPartitionKeys * world_size)), 1, kMaxHashPartitions);
  num_partitions_ = world_size * per_owner;
  int hash_shift = 64;
  for (int64_t p = per_owner; p > 1; p /= 2) --hash_shift;
  const int64_t num_chunks = (num_keys_ + kChunkKeys - 1) / kChunkKeys;
  const FastModulo owner_of(static_cast<uint64_t>(world_size));
  const auto chunk_end = [&](int64_t chunk) {
    return std::min((chunk + 1) * kChunkKeys, num_keys_);
  };

  const Scratch<uint32_t> partition_of(num_keys_);
  // places[chunk, partition]: first a count, then where the chunk's next key of it goes.
  std::vector<uint32_t> places(num_chunks * num_partitions_, 0);
  ex.ParallelFor(num_chunks, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      uint32_t* count = &places[chunk * num_partitions_];
      for (int64_t i = chunk * kChunkKeys; i < chunk_end(chunk); ++i) {
        // A shift by 64 is undefined, hence the two steps.
        uint64_t partition = (MixKey(keys[i]) >> 1) >> (hash_shift - 1);
        if (world_size > 1) partition += owner_of(keys[i]) * per_owner;
        partition_of[i] = static_cast<uint32_t>(partition);
        ++count[partition];
      }
    }
  });

  partition_offsets_.resize(num_partitions_ + 1);
  uint32_t place = 0;
  for (int64_t p = 0; p < num_partitions_; ++p) {
    partition_offsets_[p] = place;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      const uint32_t count = places[chunk * num_partitions_ + p];
      places[chunk * num_partitions_ + p] = place;
      place += count;
    }
  }
  partition_offsets_[num_partitions_] = place;

  ex.ParallelFor(num_chunks, 1, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> next(num_partitions_);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      std::copy_n(&places[chunk * num_partitions_], num_partitions_, next.data());
      for (int64_t i = chunk * kChunkKeys; i < chunk_end(chunk); ++i) {
        scattered_[next[partition_of[i]]++] = keys[i];
      }
    }
  });

  const Scratch<int32_t> local_ids(num_keys_);
  std::vector<int32_t> num_local(num_partitions_);
  ex.ParallelFor(num_partitions_, std::max<int64_t>(1, num_partitions_ / 64),
                 [&](int64_t first, int64_t last) {
                   LocalTable table;
                   for (int64_t p = first; p < last; ++p) {
                     const int64_t begin = partition_offsets_[p];
                     uint64_t* partition_keys = &scattered_[begin];
                     num_local[p] = table.Run(partition_keys, partition_offsets_[p + 1] - begin,
                                              partition_keys, &local_ids[begin]);
                   }
                 });

  unique_offsets_.resize(num_partitions_ + 1);
  unique_offsets_[0] = 0;
  for (int64_t p = 0; p < num_partitions_; ++p) {
    unique_offsets_[p + 1] = unique_offsets_[p] + num_local[p];
  }
  owner_offsets_.resize(world_size + 1);
  for (int64_t owner = 0; owner <= world_size; ++owner) {
    owner_offsets_[owner] = unique_offsets_[owner * per_owner];
  }

  ex.ParallelFor(num_chunks, 1, [&](int64_t first, int64_t last) {
    std::vector<uint32_t> next(num_partitions_);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      std::copy_n(&places[chunk * num_partitions_], num_partitions_, next.data());
      for (int64_t i = chunk * kChunkKeys; i < chunk_end(chunk); ++i) {
        const uint32_t partition = partition_of[i];
        inverse[i] =
            static_cast<int32_t>(unique_offsets_[partition]) + local_ids[next[partition]++];
      }
    }
  });
}

Route::Route(Executor& ex, const uint64_t* keys, int64_t num_keys, int64_t world_size,
             int32_t* inverse)
    : num_keys_(num_keys) {
  CheckNumKeys(num_keys);
  if (world_size < 1) {
    throw std::invalid_argument("`world_size` must be at least 1. Received: " +
                                std::to_string(world_size));
  }
  scattered_ = Scratch<uint64_t>(num_keys);
  if (num_keys <= kSerialKeys) {
    RunSerial(keys, world_size, inverse);
  } else {
    RunPartitioned(ex, keys, world_size, inverse);
  }
}

void Route::WriteUnique(Executor& ex, uint64_t* unique) const {
  // Few keys are copied here: to wake a thread for each of many small tables would take longer.
  const int64_t grain = num_partitions_ * kCopiedKeys / std::max<int64_t>(1, num_unique());
  ex.ParallelFor(num_partitions_, std::clamp<int64_t>(grain, 1, num_partitions_),
                 [&](int64_t first, int64_t last) {
                   for (int64_t p = first; p < last; ++p) {
                     std::copy_n(&scattered_[partition_offsets_[p]],
                                 unique_offsets_[p + 1] - unique_offsets_[p],
                                 unique + unique_offsets_[p]);
                   }
                 });
}

int64_t UniqueKeys(Executor& ex, const uint64_t* keys, int64_t num_keys, uint64_t* unique,
                   int32_t* inverse) {
  CheckNumKeys(num_keys);
  if (num_keys <= kSerialKeys) return LocalTable().Run(keys, num_keys, unique, inverse);
  const Route route(ex, keys, num_keys, /*world_size=*/1, inverse);
  route.WriteUnique(ex, unique);
  return route.num_unique();
}

void PlaceRows(Executor& ex, const RowPlacement& placement, int64_t world_size, const int64_t* ids,
               int64_t num_keys, uint64_t* keys) {
  constexpr int64_t kGrain = 1 << 14;
  ex.ParallelFor(num_keys, kGrain, [=](int64_t begin, int64_t end) {
    const RowPlacement mine = placement;  // a local copy, which `keys` cannot alias
    for (int64_t k = begin; k < end; ++k) keys[k] = PlaceRow(mine, world_size, ids[k]);
  });
}

}  // namespace sok
