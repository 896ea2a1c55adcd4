// Arena: rows by number, in chunks that never move.
//
//     chunks   | chunk 0 | chunk 1 | ... |          row r: chunk r >> shift, place r & mask
//     chunk    | row | row | row | ...   |          a power of two of rows, 2 to 4 MiB
//     row      | embedding, dim | slot rows | pad | 16-byte aligned, 64-byte if that is cheap
//
// Growing adds chunks, so a row's address stays valid and nothing is copied. Chunk 0 takes small
// pages that are committed as rows are first written: a small table stays small. Later chunks ask
// for huge pages. A row wider than 2 MiB is a chunk of its own.
//
// With `storage` the chunks are parts of a file (row_file.h). Rows are read and written in the same
// way, but before using many rows, callers Bring them.
#ifndef SOK_CORE_CPU_ARENA_H_
#define SOK_CORE_CPU_ARENA_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/cpu/memory.h"
#include "cpp/core/cpu/row_cache.h"
#include "cpp/core/parallel.h"

namespace sok {

class Arena {
 public:
  // `row_floats`: embedding and slot rows.
  explicit Arena(int64_t row_floats) : Arena(row_floats, StorageOptions(), "") {}
  // Throws as RowFile does if storage is used; errors name `table`. Takes chunks from `pool` and gives
  // them back, unless that is null.
  Arena(int64_t row_floats, const StorageOptions& storage, const std::string& table,
        BlockPool* pool = nullptr);
  ~Arena();
  Arena(Arena&&) = default;

  int64_t stride() const { return stride_; }  // floats from a row to the next
  int64_t chunk_rows() const { return int64_t{1} << shift_; }
  int64_t num_chunks() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t bytes() const { return bytes_; }

  // The row's chunk must exist.
  float* Row(uint32_t row) const { return base_[row >> shift_] + (row & mask_) * stride_; }

  // Adds the chunks that rows [0, num_rows) lack. Throws std::bad_alloc, or std::length_error if
  // the disk is full; chunks added before that stay, which does no harm.
  void Reserve(int64_t num_rows);
  // Adds the one chunk that holds `row`. Chunks before it may stay missing.
  void ReserveRow(uint32_t row);
  bool HasRow(uint32_t row) const {
    return (row >> shift_) < base_.size() && base_[row >> shift_] != nullptr;
  }
  void FreeChunk(int64_t chunk) noexcept;
  void Clear() noexcept;  // all chunks; if they are memory, the next rows take them again
  // Frees all chunks beyond those of rows [0, num_rows). Of the others the content is lost, and the
  // system may take the memory (Memory::Offer). Not for rows on disk.
  void Keep(int64_t num_rows) noexcept;

  bool is_on_disk() const { return cache_ != nullptr; }
  // Brings rows that are about to be used from disk to memory, all in one go; does nothing without
  // a file. Skips kNoRow and rows without a chunk. Throws std::runtime_error if the disk fails;
  // then no row has changed.
  void Bring(Executor& ex, const uint32_t* rows, int64_t num_rows, RowUse use) const {
    if (cache_ != nullptr) BringListed(ex, rows, num_rows, use);
  }
  void BringRange(Executor& ex, int64_t first, int64_t num_rows, RowUse use) const;
  int64_t part_rows() const { return part_rows_; }  // that a scan may bring at a time
  StorageStats storage_stats() const;               // zeros without a file

 private:
  void AddChunk(size_t chunk);
  void GiveBack() noexcept;  // all chunks but the first
  void BringListed(Executor& ex, const uint32_t* rows, int64_t num_rows, RowUse use) const;
  int64_t FileBytes() const {  // up to the last chunk, including missing ones
    return static_cast<int64_t>(base_.size()) * file_->chunk_bytes();
  }

  BlockPool* pool_ = nullptr;
  int64_t stride_;
  int shift_;
  uint32_t mask_;
  int64_t bytes_ = 0;
  int64_t part_rows_ = 0;
  std::vector<float*> base_;    // of each chunk, null if missing
  std::vector<Memory> chunks_;  // parallel to base_; empty if there is a file
  std::unique_ptr<RowFile> file_;
  std::unique_ptr<RowCache> cache_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ARENA_H_
