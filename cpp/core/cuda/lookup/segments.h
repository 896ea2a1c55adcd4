// Segments of messages on the device: words moved between arrays, and where rows begin.
//
//     message   [head | 2 1 | a b | c]  [head | 1 2 | d | e f]   one block per rank (cpu/message.h)
//     moved     [a b d] [c e f]                                all keys of a table together
//     offsets   table 0: 3, 5, 12 ..                           of rows that stay where they are
//
// The host knows the lengths. It passes a list of segments, and one kernel handles them all,
// however many tables and ranks there are. Rows are addressed by word, because nothing behind a
// message's head is aligned to 16 bytes.
//
// All async except Heads, with scratch from the workspace.
#ifndef SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_
#define SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// Copies words from the host, where they may change as soon as this returns. One launch or copy:
// a few words go as a kernel's argument, more by way of pinned memory.
void UploadWords(Stream stream, const void* words, size_t num_words, uint64_t* to);

// Writes the same few words to message[target ..] of each target. One launch for some 400 targets.
void StoreInBlocks(Stream stream, const void* words, size_t num_words,
                   const std::vector<int64_t>& targets, uint64_t* message);

// A copy of host values, in memory of the workspace.
template <typename T>
T* Upload(Stream stream, Workspace& workspace, const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0, "words");
  T* const there = workspace.Take<T>(static_cast<int64_t>(values.size()));
  UploadWords(stream, values.data(), values.size() * (sizeof(T) / sizeof(uint64_t)),
              reinterpret_cast<uint64_t*>(there));
  return there;
}

template <typename T>
struct Move {
  const T* from;
  T* to;
  int64_t count;
};
// T: uint64_t, int64_t or float. Targets must not overlap.
template <typename T>
void MoveSegments(Stream stream, Workspace& workspace, const std::vector<Move<T>>& moves);

struct RowSegment {
  int64_t num_rows;
  int64_t start;  // word that the first row begins at
  int64_t dim;    // words from a row to the next
};
// The word that each row of the segments begins at, one segment after the other.
void RowOffsets(Stream stream, Workspace& workspace, const std::vector<RowSegment>& segments,
                int64_t* offsets);

// The first `num_words` words of each block of a message, on the host; blocks with fewer are
// padded with zeros. `lengths` [num_blocks] on the host. Waits.
template <typename T>
std::vector<T> Heads(Stream stream, Workspace& workspace, const T* message, const int32_t* lengths,
                     int64_t num_blocks, int64_t num_words);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_
