#include "cpp/tf/batch_watch.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "cpp/core/hash.h"

namespace sok {
namespace {

// Per table, so that an interrupted observer does not fill the memory.
constexpr size_t kMostKeys = 1 << 24;

// How often each distinct key occurs, in no particular order: linear probing, some 10 ns per key.
std::vector<int64_t> Occurrences(const std::vector<uint64_t>& keys) {
  struct Slot {
    uint64_t key = 0;
    int64_t count = 0;  // 0: empty
  };
  size_t size = 16;
  while (size < 2 * keys.size()) size *= 2;
  std::vector<Slot> slots(size);
  for (const uint64_t key : keys) {
    size_t at = HashKey(key) & (size - 1);
    while (slots[at].count > 0 && slots[at].key != key) at = (at + 1) & (size - 1);
    slots[at].key = key;
    ++slots[at].count;
  }
  std::vector<int64_t> counts;
  for (const Slot& slot : slots) {
    if (slot.count > 0) counts.push_back(slot.count);
  }
  return counts;
}

class Batches {
 public:
  static Batches& Get() {
    static auto* const batches = new Batches;
    return *batches;
  }

  bool observing() const { return observing_.load(std::memory_order_relaxed); }

  void Observe(bool on) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (on) of_table_.clear();
    observing_ = on;
  }

  void Add(const std::string& table, const uint64_t* keys, int64_t num_keys) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint64_t>& kept = of_table_[table];
    const size_t room = kMostKeys - std::min(kMostKeys, kept.size());
    kept.insert(kept.end(), keys, keys + std::min(room, static_cast<size_t>(num_keys)));
  }

  // Keys of the table's batch, the number of distinct ones, and the occurrences of the most
  // frequent 1 % of these (at least one).
  int64_t Count(const std::string& table, int64_t* unique, int64_t* hottest) {
    std::vector<uint64_t> keys;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = of_table_.find(table);
      if (found == of_table_.end()) return 0;
      keys = found->second;
    }
    std::vector<int64_t> counts = Occurrences(keys);
    *unique = counts.size();
    const size_t most = (counts.size() + 99) / 100;
    std::nth_element(counts.begin(), counts.begin() + most, counts.end(), std::greater<int64_t>());
    *hottest = 0;
    for (size_t i = 0; i < most; ++i) *hottest += counts[i];
    return keys.size();
  }

 private:
  std::atomic<bool> observing_{false};
  std::mutex mutex_;
  std::map<std::string, std::vector<uint64_t>> of_table_;
};

}  // namespace

bool ObservesBatches() { return Batches::Get().observing(); }

void ObserveBatch(const std::string& table, const uint64_t* keys, int64_t num_keys) {
  Batches::Get().Add(table, keys, num_keys);
}

}  // namespace sok

#define SOK_EXPORT extern "C" __attribute__((visibility("default")))

// 1: forgets the kept batches and keeps new ones; 0: stops keeping batches.
SOK_EXPORT void sok_observe_batches(int on) { sok::Batches::Get().Observe(on != 0); }

SOK_EXPORT int64_t sok_observed_batch(const char* table, int64_t* unique, int64_t* hottest) {
  return sok::Batches::Get().Count(table, unique, hottest);
}
