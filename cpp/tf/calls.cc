#include "cpp/tf/calls.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sok {
namespace {

std::mutex mutex;

struct Numbers {
  uint64_t at_least = 0;                // where another rank was found
  std::map<int64_t, uint64_t> of_line;  // the last call of each line
};

Numbers& NumbersOf(int64_t hash) {  // of the lookup's name
  static auto* const numbers = new std::unordered_map<int64_t, Numbers>;
  return (*numbers)[hash];
}

}  // namespace

Call NextCall(const std::string& lookup, int64_t line, Stage stage, Wire wire) {
  const int64_t hash = Call::Of(lookup, 0, stage).hash();
  const std::lock_guard<std::mutex> lock(mutex);
  Numbers& numbers = NumbersOf(hash);
  uint64_t& number = numbers.of_line[line];
  number = std::max(number, numbers.at_least) + 1;
  return Call::Of(lookup, number, stage, wire);
}

void CatchUp(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex);
  Numbers& numbers = NumbersOf(call.hash());
  numbers.at_least = std::max(numbers.at_least, call.number());
}

}  // namespace sok
