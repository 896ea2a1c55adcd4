#include "cpp/core/combiner.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

namespace sok {

Combiner ParseCombiner(const std::string& name) {
  std::string lower = name;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (lower == "none") return Combiner::kNone;
  if (lower == "sum") return Combiner::kSum;
  if (lower == "mean") return Combiner::kMean;
  if (lower == "sqrtn") return Combiner::kSqrtn;
  throw std::invalid_argument("`combiner` must be one of none, sum, mean, sqrtn. Received: '" +
                              name + "'");
}

}  // namespace sok
