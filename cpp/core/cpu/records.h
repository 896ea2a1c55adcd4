// TableRecords: what a table with policies stores about its keys, besides their rows.
//
//     row number r -> records[r]  | key | frequency | last step |        24 bytes
//                     scores[r]   | score |                              8 bytes, for custom scores
//     waiting keys -> filter      (admission.h)
//     lowest scores -> queue      (eviction_queue.h)
//     evicted rows -> buffer      the last `evicted_buffer` of them, until they are popped
//
// A table without policies has none of this. The table's lock protects it.
//
// Invariants, since the table was made, cleared or replaced:
//     seen    == found + admitted + refused
//     size    == admitted + written - evicted - erased
//     evicted == popped + buffered + dropped
#ifndef SOK_CORE_CPU_RECORDS_H_
#define SOK_CORE_CPU_RECORDS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cpu/admission.h"
#include "cpp/core/cpu/eviction_queue.h"
#include "cpp/core/cpu/plain_array.h"
#include "cpp/core/evicted_buffer.h"
#include "cpp/core/key_records.h"
#include "cpp/core/policy.h"

namespace sok {

// One bit per row number, all zero between calls: a call pays for the rows that it marks, not for
// those of the table.
class RowMarks {
 public:
  void Reserve(int64_t num_rows) {  // throws std::bad_alloc, changing nothing
    const size_t words = static_cast<size_t>(num_rows / 64 + 1);
    if (words > words_.size()) words_.resize(words + words / 2);
  }
  bool Has(uint32_t row) const { return words_[row / 64] >> (row % 64) & 1; }
  bool Mark(uint32_t row) noexcept {  // whether it was not marked yet
    const bool is_new = !Has(row);
    words_[row / 64] |= uint64_t{1} << (row % 64);
    return is_new;
  }
  void Unmark(uint32_t row) noexcept { words_[row / 64] = 0; }  // other rows, too
  int64_t bytes() const { return static_cast<int64_t>(words_.capacity() * sizeof(uint64_t)); }
  void Clear() { std::vector<uint64_t>().swap(words_); }

 private:
  std::vector<uint64_t> words_;
};

struct TableRecords {
  explicit TableRecords(const PolicyOptions& policy_options)
      : options(policy_options),
        filter(options.filters() ? AdmissionFilter::Make(options) : nullptr) {}

  bool IsAt(uint32_t row, uint64_t key) const {
    return row < records.size() && records[row].last_step >= 0 && records[row].key == key;
  }
  const int64_t* Score(uint32_t row) const {
    switch (options.score) {
      case ScoreKind::kLru:
        return &records[row].last_step;
      case ScoreKind::kLfu:
        return &records[row].frequency;
      default:
        return &scores[row];
    }
  }
  bool has_scores() const { return options.score == ScoreKind::kCustom; }

  // Makes room for rows below `num_rows`, `num_new` of them new. Throws std::bad_alloc.
  void Reserve(int64_t num_rows, int64_t num_new) {
    if (num_rows > records.size()) {
      if (has_scores()) scores.Resize(num_rows);
      records.Resize(num_rows);
    }
    if (queue.num_rows() > 0) queue.Reserve(num_new);
  }
  // Enters the keys of the next rows below `end` into the queue, and makes room for `num_new` more.
  // Throws std::bad_alloc, changing nothing.
  void EnterRows(int64_t end, int64_t num_new) {
    const int64_t first = queue.num_rows();
    end = std::max(first, end);
    queue.Reserve(end - first + num_new);
    queue.set_num_rows(end);
    for (int64_t row = first; row < end; ++row) {
      if (records[row].last_step >= 0) Enter(static_cast<uint32_t>(row));
    }
  }
  // Records a key that got a row.
  void Add(uint32_t row, uint64_t key, int64_t frequency, int64_t last_step, int64_t score = 0) {
    records[row] = {key, frequency, last_step};
    if (has_scores()) scores[row] = score;
  }
  void Enter(uint32_t row) {
    if (row < queue.num_rows()) queue.Push({*Score(row), records[row].key, row});
  }
  void Remove(uint32_t row) { records[row].last_step = -1; }

  int64_t bytes() const {
    return records.bytes() + scores.bytes() + (filter != nullptr ? filter->bytes() : 0) +
           queue.bytes() + marks.bytes();
  }
  void Clear();

  const PolicyOptions options;
  int64_t step = 0;
  PolicyCounts statistics;        // without size, seen, buffered, waiting and step
  PlainArray<KeyRecord> records;  // [rows given out]
  PlainArray<int64_t> scores;     // parallel to it, or empty
  std::unique_ptr<AdmissionFilter> filter;
  EvictionQueue queue;
  EvictedBuffer buffer;
  RowMarks marks;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_RECORDS_H_
