#include "cpp/core/cpu/message.h"

#include <algorithm>
#include <cstring>

namespace sok {
namespace {

// The upper 8 bits of the second word: 4 for the wire, 4 for the stage.
constexpr int kWireShift = 60, kStageShift = 56;
constexpr uint64_t kStageMask = 0xF;
constexpr int64_t kNameWord = 3;
constexpr size_t kNameBytes = (Call::kNumWords - kNameWord) * sizeof(int64_t);

uint64_t HashOf(const std::string& text) {  // FNV-1a: the same in every process
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  return hash;
}

const char* NameOf(Stage stage) {
  switch (stage) {
    case Stage::kKeys:
      return "keys";
    case Stage::kRows:
      return "rows";
    case Stage::kGradients:
      return "gradients";
    default:
      return "notes";
  }
}

// The reason that a block carries, or "" for a block with data. Throws std::invalid_argument if the
// block is shorter than its text.
template <typename T>
std::string FailureIn(const T* block, int64_t num_words) {
  const uint64_t length =
      num_words < kHeadWords<T> ? 0 : static_cast<uint32_t>(ReadHead(block).words[0]);
  if (length == 0) return "";
  if (length > (num_words - kHeadWords<T>)*sizeof(T)) {
    throw std::invalid_argument("a failed message block must hold its text of " +
                                std::to_string(length) +
                                " bytes. Received: " + std::to_string(num_words) + " words");
  }
  return std::string(reinterpret_cast<const char*>(block + kHeadWords<T>), length);
}

bool SameCall(const Call& a, const Call& b) {
  return std::equal(a.words.begin() + 1, a.words.end(), b.words.begin() + 1);
}

}  // namespace

const char* NameOf(Wire wire) {
  switch (wire) {
    case Wire::kBfloat16:
      return "bfloat16";
    case Wire::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

template <typename T>
void ThrowIfOutOfStep(const T* message, const int32_t* splits, int64_t world_size) {
  bool same = true;
  std::string calls;
  Call first;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    if (splits[rank] < kHeadWords<T>) {
      throw std::invalid_argument("a message block must hold a head of " +
                                  std::to_string(kHeadWords<T>) +
                                  " words. Received: " + std::to_string(splits[rank]));
    }
    const Call call = ReadHead(message);
    if (rank == 0) first = call;
    same &= SameCall(first, call);
    calls += (rank == 0 ? "rank " : "; rank ") + std::to_string(rank) + ": " + call.ToString();
    message += splits[rank];
  }
  if (!same) {
    throw OutOfStep("all ranks must make the same lookups in the same order. Received: " + calls);
  }
}

int32_t MoreRounds(const float* message, const int32_t* splits, int64_t world_size) {
  int32_t most = 0;
  for (int64_t rank = 0; rank < world_size; message += splits[rank++]) {
    int32_t rounds;
    std::memcpy(&rounds, message + kRoundsWord, sizeof(rounds));
    most = std::max(most, rounds);
  }
  return most;
}

Call Call::Of(const std::string& lookup, uint64_t number, Stage stage, Wire wire) {
  Call call;
  call.words[1] = static_cast<int64_t>(number | static_cast<uint64_t>(wire) << kWireShift);
  call.words[2] = static_cast<int64_t>(HashOf(lookup));
  std::memcpy(&call.words[kNameWord], lookup.data(), std::min(lookup.size(), kNameBytes));
  return call.At(stage);
}

Call Call::At(Stage stage) const {
  Call call = *this;
  call.words[0] = 0;
  const uint64_t others = static_cast<uint64_t>(words[1]) & ~(kStageMask << kStageShift);
  call.words[1] = static_cast<int64_t>(others | static_cast<uint64_t>(stage) << kStageShift);
  return call;
}

Stage Call::stage() const {
  return static_cast<Stage>(static_cast<uint64_t>(words[1]) >> kStageShift & kStageMask);
}

Wire Call::wire() const { return static_cast<Wire>(static_cast<uint64_t>(words[1]) >> kWireShift); }

uint64_t Call::number() const {
  return static_cast<uint64_t>(words[1]) & ((uint64_t{1} << kStageShift) - 1);
}

std::string Call::ToString() const {
  const char* const name = reinterpret_cast<const char*>(&words[kNameWord]);
  return std::string(NameOf(stage())) + " of call " + std::to_string(number()) + " of '" +
         std::string(name, strnlen(name, kNameBytes)) + "'" +
         (wire() == Wire::kFloat32 ? "" : std::string(" (wire_dtype=") + NameOf(wire()) + ")");
}

template <typename T>
void WriteHead(const Call& call, T* block) {
  std::memcpy(block, call.words.data(), sizeof(call.words));
}

template <typename T>
Call ReadHead(const T* block) {
  Call call;
  std::memcpy(call.words.data(), block, sizeof(call.words));
  return call;
}

template <typename T>
std::vector<T> FailedBlock(const std::string& reason, const Call& call) {
  const std::string text = reason.empty() ? "unknown error" : reason;
  std::vector<T> block(kHeadWords<T> + (text.size() + sizeof(T) - 1) / sizeof(T), T{0});
  Call head = call;
  head.words[0] = static_cast<int64_t>(text.size());
  WriteHead(head, block.data());
  std::memcpy(block.data() + kHeadWords<T>, text.data(), text.size());
  return block;
}

template <typename T>
void ThrowIfFailed(const T* message, const int32_t* splits, int64_t world_size) {
  ThrowIfOutOfStep(message, splits, world_size);
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
    const int64_t words = splits[rank], head = kHeadWords<int64_t> + num_tables;
    const int64_t* const counts = heads[rank] + kHeadWords<int64_t>;
    const auto num_keys = [counts](int64_t i) { return counts[i] & ~kCounted; };
    const auto is_counted = [counts](int64_t i) { return (counts[i] & kCounted) != 0; };
    // Counts come from another rank: none may lead out of its block, nor their sum wrap.
    int64_t left = words - head;
    for (int64_t i = 0; i < num_tables && left >= 0; ++i) {
      const int64_t most = is_counted(i) ? left / 2 : left;
      const bool fits = num_keys(i) >= 0 && num_keys(i) <= most;
      left = fits ? left - num_keys(i) * (is_counted(i) ? 2 : 1) : -1;
    }
    if (left != 0) {
      throw std::invalid_argument("the key message of rank " + std::to_string(rank) +
                                  " must hold " + std::to_string(num_tables) +
                                  " tables. Received: " + std::to_string(words) +
                                  " words; do all ranks look up the same tables?");
    }
    const uint64_t* keys = reinterpret_cast<const uint64_t*>(message + head);
    for (int64_t i = 0; i < num_tables; ++i) {
      segments[rank].push_back({keys, num_keys(i)});
      keys += num_keys(i);
      if (!is_counted(i)) continue;
      segments[rank].back().occurrences = reinterpret_cast<const int64_t*>(keys);
      keys += num_keys(i);
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

#define SOK_INSTANTIATE(T)                                                 \
  template void WriteHead<T>(const Call&, T*);                             \
  template Call ReadHead<T>(const T*);                                     \
  template std::vector<T> FailedBlock<T>(const std::string&, const Call&); \
  template void ThrowIfOutOfStep<T>(const T*, const int32_t*, int64_t);    \
  template void ThrowIfFailed<T>(const T*, const int32_t*, int64_t)
SOK_INSTANTIATE(int64_t);
SOK_INSTANTIATE(float);
#undef SOK_INSTANTIATE

}  // namespace sok
