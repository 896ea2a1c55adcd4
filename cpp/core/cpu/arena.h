// Arena: rows by number, in chunks that never move.
//
//     chunks   | chunk 0 | chunk 1 | ... |          row r: chunk r >> shift, place r & mask
//     chunk    | row | row | row | ...   |          a power of two of rows, 2 to 4 MiB
//     row      | embedding, dim | slot rows | pad | 16-byte aligned, 64-byte where that is cheap
//
// Growing adds chunks, so a row's address stays valid and nothing is copied. Chunk 0 takes small
// pages that are committed as rows are first written: a small table stays small. From chunk 1 on
// huge pages are asked for. A row wider than 2 MiB is a chunk of its own.
#ifndef SOK_CORE_CPU_ARENA_H_
#define SOK_CORE_CPU_ARENA_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cpu/memory.h"

namespace sok {

class Arena {
 public:
  // `row_floats`: embedding and slot rows.
  explicit Arena(int64_t row_floats);

  int64_t stride() const { return stride_; }  // floats from a row to the next
  int64_t chunk_rows() const { return int64_t{1} << shift_; }
  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t bytes() const { return bytes_; }

  // The row's chunk must exist.
  float* Row(uint32_t row) const { return base_[row >> shift_] + (row & mask_) * stride_; }

  // Adds the chunks that rows [0, num_rows) lack. Throws std::bad_alloc; chunks that were added
  // before that stay, which is no harm.
  void Reserve(int64_t num_rows);
  // Adds the one chunk that holds `row`. Chunks before it may stay missing.
  void ReserveRow(uint32_t row);
  bool HasRow(uint32_t row) const {
    return (row >> shift_) < base_.size() && base_[row >> shift_] != nullptr;
  }
  void FreeChunk(int64_t chunk) noexcept;
  void Clear() noexcept;

 private:
  void AddChunk(size_t chunk);

  int64_t stride_;
  int shift_;
  uint32_t mask_;
  int64_t bytes_ = 0;
  std::vector<float*> base_;    // of each chunk, null where missing
  std::vector<Memory> chunks_;  // parallel to base_
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ARENA_H_
