// RowCache: which blocks of a RowFile are mapped, so that they count as memory of the process.
//
//     blocks of the file     | 7 |   | 3 |   |   | 1 | 0 |   | 0 |   | ... each 4 KiB, about 20 rows
//                                                  ^ hand
//     a batch touches        *   *       *                             those not here are fetched,
//                                                                       all before one is waited for
//     too many are here      hand: counts one down, or drops a block whose count is 0
//
// A touch counts a block up, to 1 (LRU) or 7 (LFU): the clock algorithm (Corbato 1968), counting as
// in Smith, "Sequentiality and prefetching in database systems", 1978. Rows are numbered in order of
// arrival, so under a skewed distribution the rows that are read often lie in few blocks.
//
// Written behind: the system writes blocks that were dropped when it sees fit.
//
// Invariant: what this class knows decides how long an access takes, never what it reads. A block
// that is read although it is not here is fetched by the system. Blocks of the last two batches are
// never dropped, so memory stays below the limit and those two.
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
  kScan,       // read once, as by a dump: the first to go
  kScanWrite,  // read and written once
};

class RowCache {
 public:
  RowCache(RowFile* file, const StorageOptions& storage);

  // A batch, from its making to its end under the lock: Touch each block, then End. `bytes`: of the
  // file by now.
  class Batch {
   public:
    Batch(RowCache* cache, RowUse use, int64_t bytes);
    // The blocks of the file's bytes [offset, offset + bytes), which must exist.
    void Touch(int64_t offset, int64_t bytes) {
      const int64_t last = (offset + bytes - 1) >> cache_.shift_;
      for (int64_t b = offset >> cache_.shift_; b <= last; ++b) cache_.TouchBlock(b, use_);
    }
    // Has the blocks that are not here fetched, and others dropped for them. Throws
    // std::runtime_error where the disk fails.
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
  static constexpr uint32_t kBatches = (1u << 24) - 1;  // they are counted modulo that and one
  struct Block {
    uint32_t batch : 24;  // that touched it last
    uint32_t count : 3;   // of touches, less rounds of the hand
    uint32_t is_here : 1;
    uint32_t is_dirty : 1;  // may differ from the disk
    uint32_t is_leaving : 1;
    uint32_t is_on_disk : 1;
  };
  struct Run {
    int64_t first, last;  // blocks, both included
  };

  // Whether the block is of this batch or the one before.
  bool IsNeeded(const Block& block) const { return ((batch_ - block.batch) & kBatches) <= 1; }
  void TouchBlock(int64_t block, RowUse use);
  void Bring(Executor& ex, RowUse use);
  void UnmapAround(const Run& run);
  void MakeRoom(Executor& ex, int64_t num_blocks);
  // Moves the hand until so many more blocks are leaving, or all others are needed.
  void Choose(int64_t num_blocks);
  std::vector<Run> LeavingRuns();
  void DropLeaving(Executor& ex);

  RowFile& file_;
  const int64_t block_bytes_;
  const int shift_;      // of a power of two, block_bytes_
  const int64_t limit_;  // blocks
  const uint32_t most_counted_;
  mutable std::mutex mutex_;
  std::vector<Block> blocks_;
  uint32_t batch_ = 2;
  int64_t num_here_ = 0;
  int64_t hand_ = 0;
  std::vector<int64_t> absent_;   // blocks of the batch
  std::vector<int64_t> leaving_;  // some of them may have been touched since
  StorageStats stats_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_CACHE_H_
