// Plain data that goes in and out of a table with policies, the same on every device.
#ifndef SOK_CORE_KEY_RECORDS_H_
#define SOK_CORE_KEY_RECORDS_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace sok {

// A key that waits for admission.
struct WaitingKey {
  uint64_t key = 0;
  int64_t count = 0;       // training lookups with the key; with count_occurrences: occurrences
  int64_t last_step = -1;  // -1: not known
};

// An exact filter may hold `most` keys: moves those that it forgets to the front and returns their
// number. Keys seen longest ago go first, of equal steps the lower key. most / 8 more go than must,
// so that a filter that stays full is not searched at every lookup.
inline int64_t PutForgottenFirst(int64_t most, std::vector<WaitingKey>* keys) {
  const int64_t excess = static_cast<int64_t>(keys->size()) - most;
  if (excess <= 0) return 0;
  const int64_t count = excess + most / 8;
  std::nth_element(keys->begin(), keys->begin() + (count - 1), keys->end(),
                   [](const WaitingKey& a, const WaitingKey& b) {
                     return a.last_step != b.last_step ? a.last_step < b.last_step : a.key < b.key;
                   });
  return count;
}

struct KeyRecord {
  uint64_t key = 0;
  int64_t frequency = 0;   // training lookups with the key; with count_occurrences: occurrences
  int64_t last_step = -1;  // of the last such lookup, or of the write that inserted the key;
                           // -1: no key here
};

// seen = found + admitted + refused: these count each key once per step. The others count keys.
struct PolicyCounts {
  int64_t size = 0;
  int64_t seen = 0;
  int64_t found = 0;     // had a row
  int64_t admitted = 0;  // got a row
  int64_t refused = 0;   // stayed waiting
  int64_t written = 0;   // new keys of Assign and Import
  int64_t erased = 0;
  int64_t evicted = 0;
  int64_t popped = 0;             // evicted rows that were popped
  int64_t buffered = 0;           // evicted rows that can be popped
  int64_t dropped = 0;            // evicted rows that were not kept
  int64_t waiting = 0;            // keys in the exact filter; 0 for a Bloom filter
  int64_t forgotten = 0;          // waiting keys removed because there were more than max_waiting
  int64_t dropped_gradients = 0;  // keys of updates that had no row
  int64_t step = 0;

  // Calls f(name, field) for every field.
  template <typename F>
  void ForEachField(F&& f) const {
    f("size", size);
    f("seen", seen);
    f("found", found);
    f("admitted", admitted);
    f("refused", refused);
    f("written", written);
    f("erased", erased);
    f("evicted", evicted);
    f("popped", popped);
    f("buffered", buffered);
    f("dropped", dropped);
    f("waiting", waiting);
    f("forgotten", forgotten);
    f("dropped_gradients", dropped_gradients);
    f("step", step);
  }
};

// slot_rows holds the saved slots side by side.
struct KeyedRows {
  std::vector<uint64_t> keys;    // [n]
  std::vector<float> rows;       // [n, dim]
  std::vector<float> slot_rows;  // [n, slot_width()]
  std::vector<std::string> slot_names;
  std::vector<int64_t> slot_widths;

  int64_t slot_width() const {
    return std::accumulate(slot_widths.begin(), slot_widths.end(), int64_t{0});
  }
};

// Evicted keys, oldest first.
struct EvictedRows : KeyedRows {
  std::vector<int64_t> frequencies;  // [n]
  std::vector<int64_t> last_steps;   // [n]
};

// The part of a snapshot that belongs to policies; empty without them.
struct RecordSnapshot {
  std::vector<int64_t> records;  // [size, 3]: frequency, last step, score; or empty: not known
  std::vector<WaitingKey> waiting;
  std::vector<int64_t> counters;  // of a Bloom filter
  int64_t step = -1;              // -1: not known
};

}  // namespace sok

#endif  // SOK_CORE_KEY_RECORDS_H_
