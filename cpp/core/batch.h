// What a batch must satisfy before anything of it is used: limits, and the words for what breaks
// them. Shared by all devices, so that a bad batch is refused in the same words by each.
#ifndef SOK_CORE_BATCH_H_
#define SOK_CORE_BATCH_H_

#include <cstdint>
#include <string>

#include "cpp/core/platform.h"

namespace sok {

struct BatchLimits {
  int64_t max_hotness = 0;  // most keys in a sample; 0: no bound
  int64_t key_limit = 0;    // keys must lie in [0, key_limit); 0: every key is legal
  int64_t multiple = 1;     // of samples, or of keys where there are no samples
};

SOK_HD inline bool SampleIsLegal(const BatchLimits& limits, int64_t begin, int64_t end) {
  return begin <= end && (limits.max_hotness <= 0 || end - begin <= limits.max_hotness);
}
SOK_HD inline bool KeyIsLegal(const BatchLimits& limits, uint64_t key) {
  return limits.key_limit <= 0 || key < static_cast<uint64_t>(limits.key_limit);
}

// All throw std::invalid_argument naming the table, what was required and what came.

// `count`: samples, or keys where there are none.
void CheckMultiple(const std::string& table, const BatchLimits& limits, bool has_samples,
                   int64_t count);
// The first and the last of the row splits.
void CheckEnds(const std::string& table, int64_t first, int64_t last, int64_t num_keys);
// For a sample that is not legal.
[[noreturn]] void RefuseSample(const std::string& table, const BatchLimits& limits, int64_t sample,
                               int64_t begin, int64_t end);
// For a key that is not legal.
[[noreturn]] void RefuseKey(const std::string& table, const BatchLimits& limits, uint64_t key,
                            int64_t position);

}  // namespace sok

#endif  // SOK_CORE_BATCH_H_
