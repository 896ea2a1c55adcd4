// RowCache: which blocks of a RowFile are mapped ("here"), so that they count as process memory.
//
//     counts of blocks      | 7 |   | 3 |   |   | 1 | 0 |   | 0 |   |   4 KiB, about 20 rows each;
//                                                 ^ hand                blank: not here
//     a batch touches         *   *       *                             absent blocks are fetched
//                                                                       together, then waited for
//     too many are here     hand: counts a block down, or drops it if its count is 0
//
// A touch counts a block up, to 1 (LRU) or 7 (LFU): the clock algorithm (Corbato 1968), with counts
// as in Smith, "Sequentiality and prefetching in database systems", 1978. Rows are numbered in
// order of arrival, so under a skewed distribution the rows that are read often lie in few blocks.
//
// The system writes dropped blocks to disk later, when it sees fit.
//
// Invariant: this class decides how long an access takes, never what it reads: the system fetches a
// block that is read without being here. Blocks of the last two batches are never dropped, so
// memory stays below the limit plus those two batches.
//
// Thread-safe.
#ifndef SOK_CORE_CPU_ROW_CACHE_H_
#define SOK_CORE_CPU_ROW_CACHE_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "cpp/core/cpu/row_file.h"
#include "cpp/core/parallel.h"

namespace sok {

enum class RowUse {
  kRead,
  kWrite,
  kScan,       // read once, as by a dump: dropped first
  kScanWrite,  // read and written once
};

class RowCache {
 public:
  RowCache(RowFile* file, const StorageOptions& storage);

  // A batch: Touch each block, then End. Holds the lock while it exists. `bytes`: the file's
  // present size.
  class Batch {
   public:
    Batch(RowCache* cache, RowUse use, int64_t bytes);
    // The blocks of the file's bytes [offset, offset + bytes), which must exist.
    void Touch(int64_t offset, int64_t bytes) {
      const int64_t last = (offset + bytes - 1) >> cache_.shift_;
      for (int64_t b = offset >> cache_.shift_; b <= last; ++b) cache_.TouchBlock(b, use_);
    }
    // Fetches the touched blocks that are not here and drops others for them. Throws
    // std::runtime_error if the disk fails.
    void End(Executor& ex) { cache_.Bring(ex, use_); }

   private:
    RowCache& cache_;
    const RowUse use_;
    const std::lock_guard<std::mutex> lock_;
  };

  // These bytes are no longer part of the file.
  void Forget(int64_t offset, int64_t bytes) noexcept;
  StorageStats Stats() const;

 private:
  static constexpr uint32_t kBatches = (1u << 24) - 1;  // batches count modulo kBatches + 1
  struct Block {
    uint32_t batch : 24;  // the last one that touched it
    uint32_t count : 3;   // of touches, minus visits of the hand
    uint32_t is_here : 1;
    uint32_t is_dirty : 1;  // may differ from the disk
    uint32_t is_leaving : 1;
    uint32_t is_on_disk : 1;
  };
  struct Run {
    int64_t first, last;  // blocks, both included
  };
  // Calls fn(offset, bytes) for each run, in parallel.
  template <typename Fn>
  void ForEach(Executor& ex, const std::vector<Run>& runs, const Fn& fn) const;

  // Whether this batch or the one before touched the block.
  bool IsNeeded(const Block& block) const { return ((batch_ - block.batch) & kBatches) <= 1; }
  void TouchBlock(int64_t block, RowUse use);
  void Bring(Executor& ex, RowUse use);
  void UnmapAround(const Run& run);
  void MakeRoom(Executor& ex, int64_t num_blocks);
  // Moves the hand until `num_blocks` more blocks are leaving, or all others are needed.
  void Choose(int64_t num_blocks);
  std::vector<Run> LeavingRuns();
  void DropLeaving(Executor& ex);

  RowFile& file_;
  const int64_t block_bytes_;
  const int shift_;      // log2 of block_bytes_
  const int64_t limit_;  // blocks
  const uint32_t most_counted_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  uint32_t batch_ = 2;
  int64_t num_here_ = 0;
  int64_t hand_ = 0;
  std::vector<int64_t> absent_;   // blocks of the batch that are not here
  std::vector<int64_t> leaving_;  // some of them may have been touched since
  StorageStats stats_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_CACHE_H_
