#include "cpp/tf/calls.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace sok {
namespace {

std::mutex mutex;

std::unordered_map<int64_t, uint64_t>& Numbers() {  // by the hash of the lookup's name
  static auto* const numbers = new std::unordered_map<int64_t, uint64_t>;
  return *numbers;
}

}  // namespace

Call NextCall(const std::string& lookup, Stage stage, Wire wire) {
  const int64_t hash = Call::Of(lookup, 0, stage).hash();
  const std::lock_guard<std::mutex> lock(mutex);
  return Call::Of(lookup, ++Numbers()[hash], stage, wire);
}

void CatchUp(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex);
  uint64_t& number = Numbers()[call.hash()];
  number = std::max(number, call.number());
}

}  // namespace sok
