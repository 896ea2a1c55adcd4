#include "cpp/core/bloom.h"

#include <stdexcept>
#include <string>

namespace sok {

void CheckBloomCounters(const BloomShape& shape, const std::vector<int64_t>& counters) {
  if (counters.empty() || static_cast<int64_t>(counters.size()) == shape.num_counters()) return;
  throw std::invalid_argument("A Bloom filter must be restored from one of the same size, " +
                              std::to_string(shape.num_counters()) + " counters. Received: " +
                              std::to_string(counters.size()) + " counters");
}

}  // namespace sok
