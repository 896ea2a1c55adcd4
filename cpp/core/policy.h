// Policies: which keys get a row (admission) and which lose it (eviction). Only the decisions; the
// records that they need are in core/cpu/records.h and core/cuda/policies/records.h.
//
//     missing key, training -> seen filter_freq times? -- no --> waits; reads `no_permission`
//                                      | yes
//                              room in the table? -- no --> evict the keys of least score
//                                      | yes
//                                    a row
//
// A training lookup counts each of its keys once, whatever ranks and features it came from. So
// counts and the table's step (its training lookups so far) do not depend on how a batch was spread
// over ranks or threads.
//
// With `count_occurrences` a key is counted as often as it occurs, as in DeepRec. It reads its row
// only if earlier lookups counted it filter_freq times. The lookup that reaches filter_freq makes
// the row and its gradient updates it, but that lookup still reads `no_permission`.
//
// Bloom filter: with n keys and false positive probability p, m = -n ln(p) / ln(2)^2 counters, of
// which each key uses k = m / n ln(2) (B. Bloom, "Space/time trade-offs in hash coding with
// allowable errors", 1970; counters: L. Fan et al., "Summary cache", 2000).
#ifndef SOK_CORE_POLICY_H_
#define SOK_CORE_POLICY_H_

#include <cstdint>
#include <string>

#include "cpp/core/platform.h"

namespace sok {

enum class ScoreKind {
  kNone,    // a full table refuses new keys
  kLru,     // step of the last training lookup that contained the key
  kLfu,     // number of training lookups that contained the key
  kCustom,  // set by the caller, 0 until then
};

ScoreKind ParseScoreKind(const std::string& name);  // "", "lru", "lfu", "custom"

struct PolicyOptions {
  bool record = false;             // keep records even if no policy needs them
  bool count_occurrences = false;  // false: a key counts once per lookup
  // Admission.
  int64_t filter_freq = 0;          // 0 and 1: every key is admitted
  int64_t max_waiting = 0;          // keys that the exact filter may keep; 0: no bound
  int64_t bloom_max_keys = 0;       // 0: exact counts
  double bloom_probability = 0.01;  // of a false positive, in (0, 1)
  int64_t bloom_counter_bits = 64;  // 8, 16, 32 or 64
  float no_permission = 0.0f;       // every element of the row that a waiting key reads
  // Eviction.
  int64_t steps_to_live = 0;   // 0: forever
  float l2_threshold = -1.0f;  // negative: none
  ScoreKind score = ScoreKind::kNone;
  int64_t evicted_buffer = 0;  // evicted rows kept for PopEvicted

  // Calls f(name, field) for every field except `score`. `options` may be const.
  template <typename Options, typename F>
  static void ForEachField(Options& options, F&& f) {
    f("record", options.record);
    f("count_occurrences", options.count_occurrences);
    f("filter_freq", options.filter_freq);
    f("max_waiting", options.max_waiting);
    f("bloom_max_keys", options.bloom_max_keys);
    f("bloom_probability", options.bloom_probability);
    f("bloom_counter_bits", options.bloom_counter_bits);
    f("no_permission", options.no_permission);
    f("steps_to_live", options.steps_to_live);
    f("l2_threshold", options.l2_threshold);
    f("evicted_buffer", options.evicted_buffer);
  }
  bool filters() const { return filter_freq > 1; }
  bool bounds_waiting() const { return filters() && bloom_max_keys == 0 && max_waiting > 0; }
  bool evicts_on_call() const { return steps_to_live > 0 || l2_threshold >= 0.0f; }
  bool evicts_by_score() const { return score != ScoreKind::kNone; }
  bool keeps_records() const {
    return record || filters() || evicts_on_call() || evicts_by_score();
  }
  // Throws std::invalid_argument naming the field, the requirement and the value.
  void Validate(const std::string& table, int64_t max_capacity, bool use_hashtable) const;
};

struct BloomSize {
  int64_t num_counters = 0;
  int64_t num_hashes = 0;
};

inline constexpr int64_t kMaxBloomHashes = 64;

BloomSize SizeOfBloomFilter(int64_t max_keys, double probability);

// Whether a key last seen at `last_step` has outlived `steps_to_live` at `step`.
SOK_HD inline bool IsOutlived(int64_t step, int64_t last_step, int64_t steps_to_live) {
  return steps_to_live > 0 && step - last_step > steps_to_live;
}

// ---- errors of calls that do not fit a table's policy: std::invalid_argument, from the last
// std::length_error ----
void RequireRecords(bool keeps_records, const std::string& table);
void RequireCustomScore(ScoreKind score, const std::string& table);
void CheckTableStep(int64_t step, const std::string& table);
// The records of a snapshot must hold 3 values per key, or none at all.
void CheckSnapshotRecords(int64_t num_values, int64_t num_keys, const std::string& table);
// A batch's new keys and its present keys must fit into the table together.
void CheckBatchFits(int64_t num_new, int64_t num_kept, int64_t max_capacity,
                    const std::string& table);

// sum(row^2) / 2, summed in double from the first column on.
double HalfSumOfSquares(const float* row, int64_t dim);  // [dim]

}  // namespace sok

#endif  // SOK_CORE_POLICY_H_
