#include "cpp/core/policy.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cpp/core/names.h"

namespace sok {

ScoreKind ParseScoreKind(const std::string& name) {
  constexpr const char* kScores[] = {"", "lru", "lfu", "custom"};
  return ValueNamed<ScoreKind>(name, kScores,
                               "The score must be one of '', 'lru', 'lfu', 'custom'");
}

void PolicyOptions::Validate(const std::string& table, int64_t max_capacity,
                             bool use_hashtable) const {
  const auto require = [&table](bool holds, const char* requirement, const std::string& received) {
    if (holds) return;
    throw std::invalid_argument(std::string(requirement) + ". Received: " + received + " (table '" +
                                table + "')");
  };
  require(filter_freq >= 0, "`filter_freq` must not be negative", std::to_string(filter_freq));
  require(max_waiting >= 0, "`max_waiting` must not be negative", std::to_string(max_waiting));
  require(bloom_max_keys >= 0 && bloom_max_keys <= (int64_t{1} << 40),
          "`bloom_max_keys` must be in [0, 2^40]", std::to_string(bloom_max_keys));
  require(bloom_probability > 0.0 && bloom_probability < 1.0,
          "`bloom_probability` must be in (0, 1)", std::to_string(bloom_probability));
  require(bloom_counter_bits == 8 || bloom_counter_bits == 16 || bloom_counter_bits == 32 ||
              bloom_counter_bits == 64,
          "`bloom_counter_bits` must be 8, 16, 32 or 64", std::to_string(bloom_counter_bits));
  require(bloom_max_keys == 0 || bloom_counter_bits == 64 ||
              filter_freq < (int64_t{1} << bloom_counter_bits),
          "`filter_freq` must be a number that `bloom_counter_bits` bits can hold",
          std::to_string(filter_freq));
  require(std::isfinite(no_permission), "`no_permission` must be finite",
          std::to_string(no_permission));
  require(steps_to_live >= 0, "`steps_to_live` must not be negative",
          std::to_string(steps_to_live));
  require(!std::isnan(l2_threshold), "`l2_threshold` must be a number",
          std::to_string(l2_threshold));
  require(evicted_buffer >= 0, "`evicted_buffer` must not be negative",
          std::to_string(evicted_buffer));
  require(score == ScoreKind::kNone || max_capacity > 0,
          "Eviction by score needs a positive `max_capacity`", std::to_string(max_capacity));
  require(!keeps_records() || use_hashtable, "Admission and eviction need `use_hashtable`",
          "use_hashtable=false");
}

BloomSize SizeOfBloomFilter(int64_t max_keys, double probability) {
  const double ln_2 = std::log(2.0);
  const double per_key = -std::log(probability) / (ln_2 * ln_2);
  const double hashes = std::round(per_key * ln_2);
  BloomSize size;
  size.num_counters = std::max<int64_t>(
      1, static_cast<int64_t>(std::ceil(per_key * static_cast<double>(max_keys))));
  size.num_hashes = std::clamp<int64_t>(static_cast<int64_t>(hashes), 1, kMaxBloomHashes);
  return size;
}

void RequireRecords(bool keeps_records, const std::string& table) {
  if (keeps_records) return;
  throw std::invalid_argument(
      "This call needs a table with an admission or eviction policy, or with record=True. "
      "Received: table '" +
      table + "' without either");
}

void RequireCustomScore(ScoreKind score, const std::string& table) {
  if (score == ScoreKind::kCustom) return;
  throw std::invalid_argument("Scores can be assigned only if eviction uses custom scores. " +
                              std::string("Received: table '") + table + "' with another policy");
}

void CheckTableStep(int64_t step, const std::string& table) {
  if (step >= 0 && step <= (int64_t{1} << 62)) return;
  throw std::invalid_argument("`step` must be in [0, 2^62]. Received: " + std::to_string(step) +
                              " (table '" + table + "')");
}

void CheckSnapshotRecords(int64_t num_values, int64_t num_keys, const std::string& table) {
  if (num_values == 0 || num_values == 3 * num_keys) return;
  throw std::invalid_argument(
      "Import: `records` must hold 3 values per key, " + std::to_string(3 * num_keys) +
      ". Received: " + std::to_string(num_values) + " (table '" + table + "')");
}

void CheckBatchFits(int64_t num_new, int64_t num_kept, int64_t max_capacity,
                    const std::string& table) {
  if (num_kept + num_new <= max_capacity) return;
  throw std::length_error(
      "A batch must not need more than max_capacity=" + std::to_string(max_capacity) +
      " rows. Received: " + std::to_string(num_new) + " new keys and " + std::to_string(num_kept) +
      " present keys (table '" + table + "')");
}

double HalfSumOfSquares(const float* row, int64_t dim) {
  double sum = 0.0;
  for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(row[d]) * row[d];
  return 0.5 * sum;
}

}  // namespace sok
