// Limits that a batch is checked against before it is used, and the error messages. Shared by all
// devices, so that each refuses a bad batch with the same message.
#ifndef SOK_CORE_BATCH_H_
#define SOK_CORE_BATCH_H_

#include <cstdint>
#include <string>

#include "cpp/core/platform.h"

namespace sok {

struct BatchLimits {
  int64_t max_hotness = 0;  // most keys in a sample; 0: no bound
  int64_t key_limit = 0;    // keys must lie in [0, key_limit); 0: every key is legal
  int64_t multiple = 1;     // divides the number of samples, or of keys without samples
};

SOK_HD inline bool SampleIsLegal(const BatchLimits& limits, int64_t begin, int64_t end) {
  return begin <= end && (limits.max_hotness <= 0 || end - begin <= limits.max_hotness);
}
SOK_HD inline bool KeyIsLegal(const BatchLimits& limits, uint64_t key) {
  return limits.key_limit <= 0 || key < static_cast<uint64_t>(limits.key_limit);
}

// All throw std::invalid_argument naming the table, what was required and what was received.

// `count`: the number of samples, or of keys if there are no samples.
void CheckMultiple(const std::string& table, const BatchLimits& limits, bool has_samples,
                   int64_t count);
// `first` and `last`: the first and the last row split.
void CheckEnds(const std::string& table, int64_t first, int64_t last, int64_t num_keys);
// For a sample that is not legal.
[[noreturn]] void RefuseSample(const std::string& table, const BatchLimits& limits, int64_t sample,
                               int64_t begin, int64_t end);
// For a key that is not legal.
[[noreturn]] void RefuseKey(const std::string& table, const BatchLimits& limits, uint64_t key,
                            int64_t position);

}  // namespace sok

#endif  // SOK_CORE_BATCH_H_
