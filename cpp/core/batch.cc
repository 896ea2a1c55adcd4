#include "cpp/core/batch.h"

#include <stdexcept>

namespace sok {
namespace {

[[noreturn]] void Refuse(const std::string& table, const std::string& what) {
  throw std::invalid_argument(what + " (table '" + table + "')");
}

}  // namespace

void CheckMultiple(const std::string& table, const BatchLimits& limits, bool has_samples,
                   int64_t count) {
  if (limits.multiple <= 1 || count % limits.multiple == 0) return;
  Refuse(table, std::string("the number of ") + (has_samples ? "rows" : "keys") +
                    " must be a multiple of " + std::to_string(limits.multiple) +
                    ". Received: " + std::to_string(count));
}

void CheckEnds(const std::string& table, int64_t first, int64_t last, int64_t num_keys) {
  if (first == 0 && last == num_keys) return;
  Refuse(table, "row_splits must begin with 0 and end with num_keys = " + std::to_string(num_keys) +
                    ". Received: " + std::to_string(first) + " and " + std::to_string(last));
}

void RefuseSample(const std::string& table, const BatchLimits& limits, int64_t sample,
                  int64_t begin, int64_t end) {
  if (end < begin) {
    Refuse(table, "row_splits must not decrease. Received: " + std::to_string(begin) + " before " +
                      std::to_string(end) + " at sample " + std::to_string(sample));
  }
  Refuse(table, "a sample may hold at most " + std::to_string(limits.max_hotness) +
                    " keys. Received: " + std::to_string(end - begin) + " keys in row " +
                    std::to_string(sample));
}

void RefuseKey(const std::string& table, const BatchLimits& limits, uint64_t key,
               int64_t position) {
  Refuse(table, "without a hash table a key is a row index and must lie in [0, " +
                    std::to_string(limits.key_limit) + "). Received: key " +
                    std::to_string(static_cast<int64_t>(key)) + " at position " +
                    std::to_string(position));
}

}  // namespace sok
