// What ranks send each other in a lookup: two kinds of message, each one block for one destination.
//
//     key message (int64)   [0 | num_keys of table 0 .. N-1 | keys of table 0 | keys of table 1 ..]
//
//     row message (float32) [0 | rows of table 0 | rows of table 1 ..]
//
//     failed, either kind   [length of text | text, padded to whole words]
//
// The first word is why a bad batch on one rank cannot leave the others waiting: whatever happens
// to a rank before an exchange, it takes part in it and sends the reason instead of data; every
// rank reads the reason at the same place and raises it. Row messages of one table group have the
// layout of the key message they answer, so neither counts nor keys travel twice.
#ifndef SOK_CORE_CPU_MESSAGE_H_
#define SOK_CORE_CPU_MESSAGE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace sok {

// A failed block in words of T (int64_t or float). T's bits are carried as they are.
template <typename T>
std::vector<T> FailedBlock(const std::string& reason);

// The reason a block carries, or "" for a block with data. Throws std::invalid_argument for a block
// too short to be one.
template <typename T>
std::string FailureIn(const T* block, int64_t num_words);

// Blocks of all source ranks, one behind the other, as an exchange delivers them.
struct KeySegment {
  const uint64_t* keys;
  int64_t num_keys;
};

// Cuts a received key message into [world_size][num_tables] segments. Throws std::runtime_error
// with "rank r: reason" if any rank failed, std::invalid_argument if lengths do not add up.
std::vector<std::vector<KeySegment>> ParseKeyMessage(const int64_t* message, const int32_t* splits,
                                                     int64_t world_size, int64_t num_tables);

// The same of a message that carries no failure and may lie in device memory, where only `heads`,
// the first 1 + num_tables words of each rank's block (fewer where the block has fewer), are read.
std::vector<std::vector<KeySegment>> CutKeyMessage(const std::vector<const int64_t*>& heads,
                                                   const int64_t* message, const int32_t* splits,
                                                   int64_t num_tables);

// Throws std::runtime_error with "rank r: reason" for the first rank whose block says it failed.
template <typename T>
void ThrowIfFailed(const T* message, const int32_t* splits, int64_t world_size);

}  // namespace sok

#endif  // SOK_CORE_CPU_MESSAGE_H_
