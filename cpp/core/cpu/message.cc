#include "cpp/core/cpu/message.h"

#include <cstring>
#include <stdexcept>

namespace sok {
namespace {

// The first word as an integer: an int64 is one, a float carries 32 bits of one.
uint64_t StatusWord(const int64_t* block) { return static_cast<uint64_t>(*block); }
uint64_t StatusWord(const float* block) {
  uint32_t word;
  std::memcpy(&word, block, sizeof(word));
  return word;
}

template <typename T>
void SetStatusWord(T* block, uint64_t value) {
  if constexpr (sizeof(T) == 8) {
    std::memcpy(block, &value, 8);
  } else {
    const uint32_t word = static_cast<uint32_t>(value);
    std::memcpy(block, &word, 4);
  }
}

}  // namespace

template <typename T>
std::vector<T> FailedBlock(const std::string& reason) {
  const std::string text = reason.empty() ? "unknown error" : reason;
  std::vector<T> block(1 + (text.size() + sizeof(T) - 1) / sizeof(T), T{0});
  SetStatusWord(block.data(), text.size());
  std::memcpy(block.data() + 1, text.data(), text.size());
  return block;
}

template <typename T>
std::string FailureIn(const T* block, int64_t num_words) {
  if (num_words < 1) throw std::invalid_argument("a message block must hold at least one word");
  const uint64_t length = StatusWord(block);
  if (length == 0) return "";
  if (length > (num_words - 1) * sizeof(T)) {
    throw std::invalid_argument("a failed message block must hold its text of " +
                                std::to_string(length) +
                                " bytes. Received: " + std::to_string(num_words) + " words");
  }
  return std::string(reinterpret_cast<const char*>(block + 1), length);
}

template <typename T>
void ThrowIfFailed(const T* message, const int32_t* splits, int64_t world_size) {
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const std::string reason = FailureIn(message, splits[rank]);
    if (!reason.empty()) throw std::runtime_error("rank " + std::to_string(rank) + ": " + reason);
    message += splits[rank];
  }
}

std::vector<std::vector<KeySegment>> CutKeyMessage(const std::vector<const int64_t*>& heads,
                                                   const int64_t* message, const int32_t* splits,
                                                   int64_t num_tables) {
  std::vector<std::vector<KeySegment>> segments(heads.size());
  for (size_t rank = 0; rank < heads.size(); ++rank) {
    int64_t total = 0;
    const int64_t words = splits[rank];
    const int64_t* const counts = heads[rank] + 1;
    for (int64_t i = 0; i < num_tables && words > num_tables; ++i) total += counts[i];
    if (words != 1 + num_tables + total) {
      throw std::invalid_argument("the key message of rank " + std::to_string(rank) +
                                  " must hold " + std::to_string(num_tables) +
                                  " tables. Received: " + std::to_string(words) +
                                  " words; do all ranks look up the same tables?");
    }
    const uint64_t* keys = reinterpret_cast<const uint64_t*>(message + 1 + num_tables);
    for (int64_t i = 0; i < num_tables; ++i) {
      segments[rank].push_back({keys, counts[i]});
      keys += counts[i];
    }
    message += words;
  }
  return segments;
}

std::vector<std::vector<KeySegment>> ParseKeyMessage(const int64_t* message, const int32_t* splits,
                                                     int64_t world_size, int64_t num_tables) {
  ThrowIfFailed(message, splits, world_size);
  std::vector<const int64_t*> heads;
  const int64_t* block = message;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    heads.push_back(block);
    block += splits[rank];
  }
  return CutKeyMessage(heads, message, splits, num_tables);
}

template std::vector<int64_t> FailedBlock<int64_t>(const std::string&);
template std::vector<float> FailedBlock<float>(const std::string&);
template std::string FailureIn<int64_t>(const int64_t*, int64_t);
template std::string FailureIn<float>(const float*, int64_t);
template void ThrowIfFailed<int64_t>(const int64_t*, const int32_t*, int64_t);
template void ThrowIfFailed<float>(const float*, const int32_t*, int64_t);

}  // namespace sok
