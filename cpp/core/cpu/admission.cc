#include "cpp/core/cpu/admission.h"

#include <algorithm>
#include <array>
#include <limits>

#include "cpp/core/bloom.h"
#include "cpp/core/cpu/index.h"
#include "cpp/core/hash.h"

namespace sok {
namespace {

class ExactFilter final : public AdmissionFilter {
 public:
  int64_t CountWith(uint64_t hash, uint64_t key, int64_t step, int64_t occurrences) const override {
    const WaitingKey seen = Find(hash, key);
    if (occurrences > 0) return seen.count + occurrences;
    return seen.count + (seen.last_step == step ? 0 : 1);
  }

  void Reserve(int shard, int64_t num_keys) override {
    Shard& s = shards_[shard];
    s.index.MakeRoom(num_keys);
    const size_t needed = s.entries.size() + static_cast<size_t>(num_keys);
    if (needed > s.entries.capacity()) s.entries.reserve(std::max(needed, 2 * s.entries.size()));
    if (needed > s.free.capacity()) s.free.reserve(s.entries.capacity());
  }

  bool Count(uint64_t hash, uint64_t key, int64_t step, int64_t occurrences) noexcept override {
    Entry& entry = FindOrAdd(hash, key);
    const bool is_first = entry.last_step != step;
    if (occurrences > 0) {
      entry.count += occurrences;
    } else if (is_first) {
      ++entry.count;
    }
    entry.last_step = step;
    return is_first;
  }

  void Forget(uint64_t hash, uint64_t key) noexcept override {
    Shard& shard = shards_[HashShard(hash)];
    const uint32_t place = shard.index.Erase(hash, key);
    if (place != Index::kMissing) shard.free.push_back(place);  // Reserve made room
  }

  WaitingKey Find(uint64_t hash, uint64_t key) const override {
    const Shard& shard = shards_[HashShard(hash)];
    const uint32_t place = shard.index.Find(hash, key);
    if (place == Index::kMissing) return {key, 0, -1};
    return {key, shard.entries[place].count, shard.entries[place].last_step};
  }

  void Expire(int64_t step, int64_t steps_to_live) override {
    for (const WaitingKey& waiting : ExportKeys()) {
      if (!IsOutlived(step, waiting.last_step, steps_to_live)) continue;
      Forget(HashKey(waiting.key), waiting.key);
    }
  }

  int64_t ForgetOldest(int64_t most) override {
    if (num_waiting() <= most) return 0;
    std::vector<WaitingKey> keys = UnsortedKeys();
    const int64_t count = PutForgottenFirst(most, &keys);
    for (int64_t i = 0; i < count; ++i) Forget(HashKey(keys[i].key), keys[i].key);
    return count;
  }

  int64_t num_waiting() const override {
    int64_t n = 0;
    for (const Shard& shard : shards_) n += shard.index.size();
    return n;
  }

  int64_t bytes() const override {
    int64_t n = 0;
    for (const Shard& shard : shards_) {
      n += shard.index.bytes() + static_cast<int64_t>(shard.entries.capacity() * sizeof(Entry) +
                                                      shard.free.capacity() * sizeof(uint32_t));
    }
    return n;
  }

  void Clear() override {
    for (Shard& shard : shards_) {
      shard.index.Clear();
      std::vector<Entry>().swap(shard.entries);
      std::vector<uint32_t>().swap(shard.free);
    }
  }

  std::vector<WaitingKey> ExportKeys() const override {
    std::vector<WaitingKey> keys = UnsortedKeys();
    std::sort(keys.begin(), keys.end(),
              [](const WaitingKey& a, const WaitingKey& b) { return a.key < b.key; });
    return keys;
  }

  std::vector<int64_t> ExportCounters() const override { return {}; }

  void CheckCounters(const std::vector<int64_t>&) const override {}

  void Import(const std::vector<WaitingKey>& keys, const std::vector<int64_t>&) override {
    for (const WaitingKey& waiting : keys) {
      const uint64_t hash = HashKey(waiting.key);
      Reserve(HashShard(hash), 1);
      FindOrAdd(hash, waiting.key) = {waiting.count, waiting.last_step};
    }
  }

 private:
  std::vector<WaitingKey> UnsortedKeys() const {
    std::vector<WaitingKey> keys;
    keys.reserve(static_cast<size_t>(num_waiting()));
    for (const Shard& shard : shards_) {
      shard.index.ForEach([&](uint64_t key, uint32_t place) {
        keys.push_back({key, shard.entries[place].count, shard.entries[place].last_step});
      });
    }
    return keys;
  }

  struct Entry {
    int64_t count = 0;
    int64_t last_step = -1;
  };
  struct Shard {
    Index index;
    std::vector<Entry> entries;
    std::vector<uint32_t> free;  // places in `entries`; has capacity for all of them
  };

  Entry& FindOrAdd(uint64_t hash, uint64_t key) noexcept {
    Shard& shard = shards_[HashShard(hash)];
    const bool reuse = !shard.free.empty();
    const uint32_t next = reuse ? shard.free.back() : static_cast<uint32_t>(shard.entries.size());
    const uint32_t place = shard.index.FindOrInsert(hash, key, next);
    if (place != next) return shard.entries[place];
    if (reuse) {
      shard.free.pop_back();
      shard.entries[place] = Entry();
    } else {
      shard.entries.emplace_back();
    }
    return shard.entries[place];
  }

  std::array<Shard, kNumShards> shards_;
};

template <typename Counter>
class BloomFilter final : public AdmissionFilter {
 public:
  explicit BloomFilter(const PolicyOptions& options)
      : shape_(ShapeOfBloomFilter(options)),
        counters_(static_cast<size_t>(shape_.num_counters())) {}

  int64_t CountWith(uint64_t hash, uint64_t key, int64_t, int64_t occurrences) const override {
    const int64_t count = Find(hash, key).count, more = std::max<int64_t>(occurrences, 1);
    return count + std::min(more, std::numeric_limits<int64_t>::max() - count);
  }

  void Reserve(int, int64_t) override {}

  bool Count(uint64_t hash, uint64_t, int64_t, int64_t occurrences) noexcept override {
    const auto more = static_cast<uint64_t>(std::max<int64_t>(occurrences, 1));
    int64_t places[kMaxBloomHashes];
    const int n = Places(hash, places);
    for (int i = 0; i < n; ++i) {
      Counter& counter = counters_[places[i]];
      const uint64_t room = std::numeric_limits<Counter>::max() - counter;
      counter = static_cast<Counter>(counter + std::min(more, room));
    }
    return true;
  }

  void Forget(uint64_t, uint64_t) noexcept override {}

  WaitingKey Find(uint64_t hash, uint64_t key) const override {
    int64_t places[kMaxBloomHashes];
    const int n = Places(hash, places);
    Counter least = counters_[places[0]];
    for (int i = 1; i < n; ++i) least = std::min(least, counters_[places[i]]);
    return {key, Clipped(least), -1};
  }

  void Expire(int64_t, int64_t) override {}
  int64_t ForgetOldest(int64_t) override { return 0; }
  int64_t num_waiting() const override { return 0; }
  int64_t bytes() const override {
    return static_cast<int64_t>(counters_.size() * sizeof(Counter));
  }
  void Clear() override { std::fill(counters_.begin(), counters_.end(), Counter{0}); }
  std::vector<WaitingKey> ExportKeys() const override { return {}; }

  std::vector<int64_t> ExportCounters() const override {
    std::vector<int64_t> exported(counters_.size());
    std::transform(counters_.begin(), counters_.end(), exported.begin(), Clipped);
    return exported;
  }

  void CheckCounters(const std::vector<int64_t>& counters) const override {
    CheckBloomCounters(shape_, counters);
  }

  void Import(const std::vector<WaitingKey>& keys, const std::vector<int64_t>& counters) override {
    const int64_t most = Clipped(std::numeric_limits<Counter>::max());
    for (size_t i = 0; i < counters.size(); ++i) {
      counters_[i] = static_cast<Counter>(std::clamp<int64_t>(counters[i], 0, most));
    }
    for (const WaitingKey& waiting : keys) {
      int64_t places[kMaxBloomHashes];
      const int n = Places(HashKey(waiting.key), places);
      const auto count = static_cast<Counter>(std::clamp<int64_t>(waiting.count, 0, most));
      for (int i = 0; i < n; ++i) counters_[places[i]] = std::max(counters_[places[i]], count);
    }
  }

 private:
  static int64_t Clipped(Counter counter) {
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    return static_cast<int64_t>(std::min<uint64_t>(counter, kMost));
  }

  // The distinct places of a key's counters.
  int Places(uint64_t hash, int64_t* places) const {
    const BloomPlaces all(shape_, hash);
    for (int i = 0; i < shape_.num_hashes; ++i) places[i] = all[i];
    // Equal ones would count a key twice.
    std::sort(places, places + shape_.num_hashes);
    return static_cast<int>(std::unique(places, places + shape_.num_hashes) - places);
  }

  const BloomShape shape_;
  std::vector<Counter> counters_;  // [kNumShards, shard_counters]
};

}  // namespace

std::unique_ptr<AdmissionFilter> AdmissionFilter::Make(const PolicyOptions& options) {
  if (options.bloom_max_keys == 0) return std::make_unique<ExactFilter>();
  switch (options.bloom_counter_bits) {
    case 8:
      return std::make_unique<BloomFilter<uint8_t>>(options);
    case 16:
      return std::make_unique<BloomFilter<uint16_t>>(options);
    case 32:
      return std::make_unique<BloomFilter<uint32_t>>(options);
    default:
      return std::make_unique<BloomFilter<uint64_t>>(options);
  }
}

}  // namespace sok
