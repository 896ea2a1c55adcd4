#include "cpp/core/cpu/admission.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "cpp/core/bloom.h"
#include "cpp/core/cpu/index.h"
#include "cpp/core/cpu/plain_array.h"
#include "cpp/core/hash.h"

namespace sok {
namespace {

constexpr int64_t kBucketsRead = 4096;  // of an instant at a time: half a millisecond

void SortByKey(std::vector<WaitingKey>* keys) {
  std::sort(keys->begin(), keys->end(),
            [](const WaitingKey& a, const WaitingKey& b) { return a.key < b.key; });
}

}  // namespace

std::vector<WaitingKey> WaitingInstant::Take() {
  std::vector<WaitingKey> keys;
  size_t num_keys = 0;
  for (const Shard& shard : shards_) num_keys += shard.keys.size();
  keys.reserve(num_keys);
  for (Shard& shard : shards_) {
    keys.insert(keys.end(), shard.keys.begin(), shard.keys.end());
    shard = Shard();
  }
  SortByKey(&keys);
  return keys;
}

class ExactFilter final : public AdmissionFilter {
 public:
  ExactFilter() {
    for (int s = 0; s < kNumShards; ++s) shards_[s].index.GrowAsShard(s);
  }

  void Prefetch(uint64_t hash) const override {
    __builtin_prefetch(shards_[HashShard(hash)].index.Home(hash));
  }

  int64_t CountWith(uint64_t hash, uint64_t key, int64_t step, int64_t occurrences) const override {
    const WaitingKey seen = Find(hash, key);
    if (occurrences > 0) return seen.count + occurrences;
    return seen.count + (seen.last_step == step ? 0 : 1);
  }

  void Reserve(int shard, int64_t num_keys) override {
    Shard& s = shards_[shard];
    s.index.MakeRoom(num_keys);
    s.entries.Reserve(s.entries.size() + num_keys);
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

  bool Forget(uint64_t hash, uint64_t key) noexcept override {
    Shard& shard = shards_[HashShard(hash)];
    const uint32_t place = shard.index.Erase(hash, key);
    if (place == Index::kMissing) return false;
    Save(HashShard(hash), place, key);
    shard.entries[place].count = shard.free;
    shard.free = place;
    return true;
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
      n += shard.index.bytes() + shard.entries.bytes();
    }
    return n;
  }

  void Clear() override {
    for (Shard& shard : shards_) {
      shard.index.Clear();
      shard.entries.Clear();
      shard.free = -1;
    }
  }

  std::vector<WaitingKey> ExportKeys() const override {
    std::vector<WaitingKey> keys = UnsortedKeys();
    SortByKey(&keys);
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

  std::shared_ptr<WaitingInstant> BeginInstant() override {
    auto instant = std::make_shared<WaitingInstant>();
    for (int s = 0; s < kNumShards; ++s) {
      WaitingInstant::Shard& shard = instant->shards_[s];
      shard.num_entries = shards_[s].entries.size();
      shard.taken = Memory(static_cast<size_t>(shard.num_entries), /*huge=*/false);
      shard.keys.reserve(static_cast<size_t>(shards_[s].index.size()));
    }
    return instant_ = std::move(instant);
  }

  void ReadInstant() override {
    if (instant_ == nullptr) return;
    WaitingInstant& instant = *instant_;
    const int s = static_cast<int>(instant.shard_);
    const Index& index = shards_[s].index;
    // Where keys have moved to other buckets, the shard is read again from its first one.
    if (index.layout() != std::exchange(instant.layout_, index.layout())) instant.bucket_ = 0;
    const int64_t end = std::min(index.num_buckets(), instant.bucket_ + kBucketsRead);
    index.ForEachIn(instant.bucket_, end,
                    [&](uint64_t key, uint32_t place) { Save(s, place, key); });
    instant.bucket_ = end;
    if (end < index.num_buckets()) return;
    instant.bucket_ = 0;
    if (++instant.shard_ < kNumShards) {
      instant.layout_ = shards_[instant.shard_].index.layout();
      return;
    }
    instant.is_whole_ = true;
    instant_ = nullptr;
  }
  void ReadRestOfInstant() noexcept override {
    while (instant_ != nullptr) ReadInstant();
  }
  void DropInstant() noexcept override { instant_ = nullptr; }

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
    int64_t count = 0;  // of a free entry: the next free one
    int64_t last_step = -1;
  };
  struct Shard {
    Index index;
    PlainArray<Entry> entries;
    int64_t free = -1;  // the free place of `entries` to take first, or -1
  };

  Entry& FindOrAdd(uint64_t hash, uint64_t key) noexcept {
    Shard& shard = shards_[HashShard(hash)];
    const bool reuse = shard.free >= 0;
    const auto next = static_cast<uint32_t>(reuse ? shard.free : shard.entries.size());
    const uint32_t place = shard.index.FindOrInsert(hash, key, next);
    Save(HashShard(hash), place, key, /*was_free=*/place == next);
    if (place != next) return shard.entries[place];
    if (reuse) {
      shard.free = shard.entries[place].count;
      shard.entries[place] = Entry();
    } else {
      shard.entries.Push(Entry());
    }
    return shard.entries[place];
  }

  // Before a key of the instant changes, or a place that was free gets a key.
  void Save(int shard, uint32_t place, uint64_t key, bool was_free = false) noexcept {
    if (instant_ == nullptr) return;
    WaitingInstant::Shard& saved = instant_->shards_[shard];
    if (place >= saved.num_entries) return;
    auto* const taken = static_cast<uint8_t*>(saved.taken.data()) + place;
    if (std::exchange(*taken, 1) != 0 || was_free) return;
    const Entry& entry = shards_[shard].entries[place];
    saved.keys.push_back({key, entry.count, entry.last_step});
  }

  std::array<Shard, kNumShards> shards_;
  std::shared_ptr<WaitingInstant> instant_;  // null once it is whole
};

namespace {

template <typename Counter>
class BloomFilter final : public AdmissionFilter {
 public:
  explicit BloomFilter(const PolicyOptions& options)
      : shape_(ShapeOfBloomFilter(options)),
        memory_(static_cast<size_t>(shape_.num_counters()) * sizeof(Counter),
                shape_.num_counters() * sizeof(Counter) >= kHugePageBytes),
        counters_(static_cast<Counter*>(memory_.data())) {
    Clear();  // touches all pages now: the first lookups would, a new one for each key
  }

  void Prefetch(uint64_t hash) const override {
    const BloomPlaces all(shape_, hash);
    for (int i = 0; i < shape_.num_hashes; ++i) __builtin_prefetch(&counters_[all[i]], 1);
  }

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

  bool Forget(uint64_t, uint64_t) noexcept override { return false; }

  WaitingKey Find(uint64_t hash, uint64_t key) const override {
    int64_t places[kMaxBloomHashes];
    const int n = Places(hash, places);
    Counter least = std::numeric_limits<Counter>::max();
    for (int i = 0; i < n; ++i) least = std::min(least, counters_[places[i]]);
    return {key, Clipped(least), -1};
  }

  void Expire(int64_t, int64_t) override {}
  int64_t ForgetOldest(int64_t) override { return 0; }
  int64_t num_waiting() const override { return 0; }
  int64_t bytes() const override {
    return shape_.num_counters() * static_cast<int64_t>(sizeof(Counter));
  }
  void Clear() override { std::fill_n(counters_, shape_.num_counters(), Counter{0}); }
  std::vector<WaitingKey> ExportKeys() const override { return {}; }

  std::vector<int64_t> ExportCounters() const override {
    std::vector<int64_t> exported(static_cast<size_t>(shape_.num_counters()));
    std::transform(counters_, counters_ + shape_.num_counters(), exported.begin(), Clipped);
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
  Memory memory_;
  Counter* const counters_;  // [kNumShards, shard_counters]
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
