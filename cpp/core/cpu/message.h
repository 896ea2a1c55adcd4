// What ranks send each other in a lookup: two kinds of message, each one block for one destination.
//
//     key message (int64)   [head | num_keys of table 0 .. N-1 | keys of table 0 | of table 1 ..]
//
//         of a table that counts occurrences: num_keys + kCounted, and after its keys one word per
//         key that says how often it occurs in the rank's batch
//
//     row message (float32) [head | rows of table 0 | rows of table 1 ..]
//
//     failed, either kind   [head | text, padded to whole words]
//
//     head, 64 bytes        [length of the failure's text, or 0, and rounds to come, 32 bits each |
//                            wire, stage and number of the call | hash of the lookup's name |
//                            the name's first 40 bytes]
//
// A bad batch on one rank cannot leave the others waiting: a rank that failed before an exchange
// still takes part in it, but sends the reason instead of data. Every rank finds the reason through
// the head's first word and raises it. The rest of the head names the call: each rank sees all
// heads and raises unless they are equal, so ranks in different calls cannot read each other's
// data.
//
// Messages too large for the transport travel in rounds. The first round brings the heads, where
// all ranks read how many more there will be. Row messages have the layout of the key message that
// they answer, so neither counts nor keys travel twice.
#ifndef SOK_CORE_CPU_MESSAGE_H_
#define SOK_CORE_CPU_MESSAGE_H_

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sok {

// Which part of a call a message belongs to.
enum class Stage : uint8_t { kKeys = 1, kRows = 2, kGradients = 3, kNotes = 4 };

// The type in which the floats of a call's row messages travel (cpp/tf/narrow_ops.cc).
enum class Wire : uint8_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };
const char* NameOf(Wire wire);

// Which call of which lookup a message belongs to: a head without a failure.
struct Call {
  static constexpr int64_t kNumWords = 8;
  std::array<int64_t, kNumWords> words{};

  static Call Of(const std::string& lookup, uint64_t number, Stage stage,
                 Wire wire = Wire::kFloat32);
  Call At(Stage stage) const;
  Stage stage() const;
  Wire wire() const;
  uint64_t number() const;
  int64_t hash() const { return words[2]; }  // of the lookup's name
  std::string ToString() const;              // "keys of call 3 of 'users'"
};

// Words of T (int64_t or float) that a head takes.
template <typename T>
constexpr int64_t kHeadWords = Call::kNumWords * sizeof(int64_t) / sizeof(T);

template <typename T>
void WriteHead(const Call& call, T* block);
template <typename T>
Call ReadHead(const T* block);

// Ranks in different calls met in one exchange.
class OutOfStep : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A failed block in words of T (int64_t or float). T's bits are carried as they are.
template <typename T>
std::vector<T> FailedBlock(const std::string& reason, const Call& call);

// The keys of one table in one rank's block.
struct KeySegment {
  const uint64_t* keys;
  int64_t num_keys;
  const int64_t* occurrences = nullptr;  // [num_keys]; null: not sent
};

// Added to the number of keys if their occurrences follow them.
inline constexpr int64_t kCounted = int64_t{1} << 62;

// Cuts a received key message, the blocks of all source ranks one after the other, into
// [world_size][num_tables] segments. Throws std::runtime_error with "rank r: reason" if any rank
// failed, std::invalid_argument if lengths do not add up.
std::vector<std::vector<KeySegment>> ParseKeyMessage(const int64_t* message, const int32_t* splits,
                                                     int64_t world_size, int64_t num_tables);

// The same for a message without failures that may lie in device memory: only `heads` are read, the
// head and num_tables words of each rank's block (fewer if the block has fewer).
std::vector<std::vector<KeySegment>> CutKeyMessage(const std::vector<const int64_t*>& heads,
                                                   const int64_t* message, const int32_t* splits,
                                                   int64_t num_tables);

// Both throw OutOfStep, naming all calls, if the ranks' heads are of different calls. ThrowIfFailed
// throws std::runtime_error with "rank r: reason" for the first rank that failed.
template <typename T>
void ThrowIfFailed(const T* message, const int32_t* splits, int64_t world_size);
template <typename T>
void ThrowIfOutOfStep(const T* message, const int32_t* splits, int64_t world_size);

// The float of a block that says how many rounds follow the first: the upper half of word 0.
constexpr int64_t kRoundsWord = 1;

// The largest number of rounds that a rank's block announces. All heads must have arrived.
int32_t MoreRounds(const float* message, const int32_t* splits, int64_t world_size);

}  // namespace sok

#endif  // SOK_CORE_CPU_MESSAGE_H_
