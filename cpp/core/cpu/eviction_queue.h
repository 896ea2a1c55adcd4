// EvictionQueue: keys by score, lowest first, of equal scores the lower key.
//
// A heap of (score, key, row) that is corrected when it is read, not when a score changes. LRU and
// LFU scores rise, so an outdated entry comes out too early and is put back with the present score.
// A key whose score falls (custom) gets a second entry; the first is dropped when it comes out. So
// are entries of keys that left the table.
//
// Invariant: every key of the table has an entry that is not above its score. Which keys come out
// therefore depends on scores and keys alone.
//
// Cost: nothing until the first eviction, then 24 bytes per key; O(log size) per new or evicted key
// and per outdated entry that comes out.
#ifndef SOK_CORE_CPU_EVICTION_QUEUE_H_
#define SOK_CORE_CPU_EVICTION_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace sok {

class EvictionQueue {
 public:
  struct Entry {
    int64_t score;
    uint64_t key;
    uint32_t row;

    bool operator<(const Entry& other) const {  // for a heap whose top is the lowest
      return score != other.score ? score > other.score : key > other.key;
    }
  };

  // Before the first Build there is nothing to keep up to date.
  bool is_built() const { return is_built_; }
  int64_t bytes() const { return static_cast<int64_t>(heap_.capacity() * sizeof(Entry)); }

  void Build(std::vector<Entry> entries) {
    heap_ = std::move(entries);
    std::make_heap(heap_.begin(), heap_.end());
    is_built_ = true;
  }
  // Never allocates for an entry that Take has removed, or that there is room for (Reserve).
  void Push(const Entry& entry) {
    heap_.push_back(entry);
    std::push_heap(heap_.begin(), heap_.end());
  }
  void Reserve(int64_t more) {
    const size_t needed = heap_.size() + static_cast<size_t>(more);
    if (needed > heap_.capacity()) heap_.reserve(std::max(needed, 2 * heap_.size()));
  }
  // Whether entries of keys that fell in score or left the table outnumber the others.
  bool IsStale(int64_t size) const { return static_cast<int64_t>(heap_.size()) > 2 * size + 1024; }
  void Clear() {
    std::vector<Entry>().swap(heap_);
    is_built_ = false;
  }

  // Removes the `count` lowest keys, lowest first. `score_of(entry)` returns a pointer to the key's
  // score, or null if the key is no longer in that row. Keys with is_kept(row) stay; there must be
  // enough others. Throws std::bad_alloc before anything has changed.
  template <typename ScoreOf, typename IsKept>
  std::vector<Entry> Take(int64_t count, ScoreOf score_of, IsKept is_kept) {
    std::vector<Entry> taken;
    taken.reserve(static_cast<size_t>(count));
    size_t end = heap_.size();  // of the heap; behind it lie entries of keys that stay
    const auto at = [this](size_t i) { return heap_.begin() + static_cast<int64_t>(i); };
    while (static_cast<int64_t>(taken.size()) < count && end > 0) {
      std::pop_heap(heap_.begin(), at(end));
      Entry& entry = heap_[end - 1];
      const int64_t* const score = score_of(entry);
      if (score != nullptr && *score > entry.score) {
        entry.score = *score;
        std::push_heap(heap_.begin(), at(end));
        continue;
      }
      --end;
      // A key whose score fell has another entry; a correct entry may occur twice.
      const bool is_right = score != nullptr && *score == entry.score;
      if (is_right && is_kept(entry.row)) continue;
      if (is_right && (taken.empty() || taken.back().key != entry.key)) taken.push_back(entry);
      entry = heap_.back();
      heap_.pop_back();
    }
    while (end < heap_.size()) std::push_heap(heap_.begin(), at(++end));
    return taken;
  }

 private:
  bool is_built_ = false;
  std::vector<Entry> heap_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_EVICTION_QUEUE_H_
