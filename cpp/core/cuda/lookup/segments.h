// Segments of messages on the device: words moved between arrays, and where rows begin.
//
//     message   [head | 2 1 | a b | c]  [head | 1 2 | d | e f]   one block per rank (cpu/message.h)
//     moved     [a b d] [c e f]                                all keys of a table together
//     offsets   table 0: 3, 5, 12 ..                           of rows that stay where they are
//
// The host knows the lengths. It passes one list of segments, and one kernel handles them all,
// however many tables and ranks there are. Rows are addressed by word, because nothing behind a
// message's head is aligned to 16 bytes.
//
// All async except Heads, with scratch from the workspace.
#ifndef SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_
#define SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// Copies words from the host, where they may change as soon as this returns. One launch or copy:
// a few words go as a kernel's argument, more by way of pinned memory.
void UploadWords(Stream stream, const void* words, size_t num_words, uint64_t* to);

// Writes the same few words, of 4 or 8 bytes, to message[target ..] of each target. One launch for
// some 400 targets.
template <typename T>
void StoreInBlocks(Stream stream, const T* words, size_t num_words,
                   const std::vector<int64_t>& targets, T* message);

// Work on segments, all of it in one kernel, with one list that goes to the device before.
class SegmentList {
 public:
  // T has 4 or 8 bytes. Targets must not overlap.
  template <typename T>
  void Move(const T* from, T* to, int64_t count) {
    Add(count, reinterpret_cast<uint64_t>(from), to, KindOf(sizeof(T)));
  }
  // Words of the host, which go to the device with the list: returns their place, for MoveKept.
  int64_t Keep(const int64_t* words, int64_t num_words);
  template <typename T>
  void MoveKept(int64_t place, T* to, int64_t count) {
    from_kept_.push_back(segments_.size());
    Add(count, static_cast<uint64_t>(place) * sizeof(uint64_t), to, KindOf(sizeof(T)));
  }
  // offsets[i] = start + i * dim: the words that the rows of a segment begin at.
  void WriteOffsets(int64_t num_rows, int64_t start, int64_t dim, int64_t* offsets) {
    Add(num_rows, static_cast<uint64_t>(start), offsets, dim);
  }
  void Run(Stream stream, Workspace& workspace);

  struct Segment {
    int64_t begin;  // number of its first element, counted over all segments: none is empty
    uint64_t from;  // an address, or the first offset
    void* to;
    int64_t kind;  // kWords4, kWords8, or the distance of rows whose offsets are written
  };
  static constexpr int64_t kWords4 = 0, kWords8 = -1;

 private:
  static constexpr int64_t KindOf(size_t bytes) { return bytes == 8 ? kWords8 : kWords4; }
  void Add(int64_t count, uint64_t from, void* to, int64_t kind);

  std::vector<Segment> segments_;
  std::vector<size_t> from_kept_;  // of them, those whose `from` is counted from the kept words
  std::vector<int64_t> kept_;
  int64_t num_elements_ = 0;
};

// The first `num_words` words of each block of a message, on the host; blocks with fewer are
// padded with zeros. `lengths` [num_blocks] on the host. One launch for some 400 blocks. Waits.
template <typename T>
std::vector<T> Heads(Stream stream, const T* message, const int32_t* lengths, int64_t num_blocks,
                     int64_t num_words);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_SEGMENTS_H_
