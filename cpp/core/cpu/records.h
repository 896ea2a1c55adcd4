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

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cpu/admission.h"
#include "cpp/core/cpu/eviction_queue.h"
#include "cpp/core/evicted_buffer.h"
#include "cpp/core/key_records.h"
#include "cpp/core/policy.h"

namespace sok {

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
    if (static_cast<size_t>(num_rows) > records.size()) {
      records.resize(static_cast<size_t>(num_rows));
      if (has_scores()) scores.resize(static_cast<size_t>(num_rows));
    }
    if (queue.is_built()) queue.Reserve(num_new);
  }
  // Records a key that got a row.
  void Add(uint32_t row, uint64_t key, int64_t frequency, int64_t last_step, int64_t score = 0) {
    records[row] = {key, frequency, last_step};
    if (has_scores()) scores[row] = score;
  }
  void Enter(uint32_t row) {
    if (queue.is_built()) queue.Push({*Score(row), records[row].key, row});
  }
  void Remove(uint32_t row) { records[row].last_step = -1; }

  int64_t bytes() const {
    return static_cast<int64_t>(records.capacity() * sizeof(KeyRecord) +
                                scores.capacity() * sizeof(int64_t)) +
           (filter != nullptr ? filter->bytes() : 0) + queue.bytes() +
           static_cast<int64_t>(kept.capacity() * sizeof(uint64_t));
  }
  void Clear();

  const PolicyOptions options;
  int64_t step = 0;
  PolicyCounts statistics;         // without size, seen, buffered, waiting and step
  std::vector<KeyRecord> records;  // [rows given out]
  std::vector<int64_t> scores;     // parallel to it, or empty
  std::unique_ptr<AdmissionFilter> filter;
  EvictionQueue queue;
  EvictedBuffer buffer;
  std::vector<uint64_t> kept;  // one bit per row number, all zero between calls
};

}  // namespace sok

#endif  // SOK_CORE_CPU_RECORDS_H_
