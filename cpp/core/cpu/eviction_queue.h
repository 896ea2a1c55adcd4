// EvictionQueue: keys by score, lowest first, of equal scores the lower key.
//
// A heap of (score, key, row) that is corrected when it is read, not when a score changes. LRU and
// LFU scores rise, so an outdated entry comes out too early and is put back with the present score.
// A key whose score falls (custom) gets a second entry; the first is dropped when it comes out. So
// are entries of keys that left the table.
//
// Invariant: every key in one of the first `num_rows()` rows has an entry that is not above its
// score, and before Take these are all rows. Which keys come out therefore depends on scores and
// keys alone.
//
// Cost: nothing while the table is far from full, then 24 bytes per key; O(log size) per new or
// evicted key and per outdated entry that comes out. The keys that a table already has enter a few at
// a time while it fills up (TableRecords::EnterRows), so that no lookup waits for all of them.
#ifndef SOK_CORE_CPU_EVICTION_QUEUE_H_
#define SOK_CORE_CPU_EVICTION_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpp/core/cpu/plain_array.h"

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

  int64_t num_rows() const { return num_rows_; }
  void set_num_rows(int64_t num_rows) { num_rows_ = num_rows; }
  int64_t bytes() const { return heap_.bytes(); }

  // There must be room: for an entry that Take has removed, or by Reserve.
  void Push(const Entry& entry) noexcept {
    heap_.Push(entry);
    std::push_heap(heap_.begin(), heap_.end());
  }
  void Reserve(int64_t more) { heap_.Reserve(heap_.size() + more); }
  // Whether entries of keys that fell in score or left the table outnumber the others.
  bool IsStale(int64_t size) const { return heap_.size() > 2 * size + 1024; }
  void Clear() noexcept {
    heap_.Clear();
    num_rows_ = 0;
  }

  // Removes the `count` lowest keys, lowest first. `score_of(entry)` returns a pointer to the key's
  // score, or null if the key is no longer in that row. Keys with is_kept(row) stay; there must be
  // enough others. Throws std::bad_alloc before anything has changed.
  template <typename ScoreOf, typename IsKept>
  std::vector<Entry> Take(int64_t count, ScoreOf score_of, IsKept is_kept) {
    std::vector<Entry> taken;
    taken.reserve(static_cast<size_t>(count));
    int64_t end = heap_.size();  // of the heap; behind it lie entries of keys that stay
    const auto at = [this](int64_t i) { return heap_.begin() + i; };
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
      entry = heap_[heap_.size() - 1];
      heap_.Pop();
    }
    while (end < heap_.size()) std::push_heap(heap_.begin(), at(++end));
    return taken;
  }

 private:
  int64_t num_rows_ = 0;
  PlainArray<Entry> heap_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_EVICTION_QUEUE_H_
