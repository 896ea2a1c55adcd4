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
// block that is read without being here. Blocks of the last two batches, and of batches whose
// blocks are on their way, are never dropped. So memory stays below the limit plus those batches.
//
// Thread-safe. The lock covers what is known of the blocks, and is released while they are brought
// and dropped, which a pool may do (parallel.h). So two batches at once may unmap a block that is
// here: the next access takes longer.
#ifndef SOK_CORE_CPU_ROW_CACHE_H_
#define SOK_CORE_CPU_ROW_CACHE_H_

#include <algorithm>
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

  // A batch: Touch each block, then End. Holds the lock until End. `bytes`: the file's present size.
  class Batch {
   public:
    Batch(RowCache* cache, RowUse use, int64_t bytes);
    ~Batch();
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;
    // The blocks of the file's bytes [offset, offset + bytes), which must exist.
    void Touch(int64_t offset, int64_t bytes) {
      const int64_t last = (offset + bytes - 1) >> cache_.shift_;
      for (int64_t b = offset >> cache_.shift_; b <= last; ++b) TouchBlock(b);
    }
    // Fetches the touched blocks that are not here and drops others for them. Throws
    // std::runtime_error if the disk fails.
    void End(Executor& ex);

   private:
    void TouchBlock(int64_t block);

    RowCache& cache_;
    const RowUse use_;
    std::unique_lock<LeafMutex> lock_;
    uint32_t number_;
    std::vector<int64_t> absent_;  // touched blocks that are not here
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
  // Calls fn(offset, bytes) for each run, in parallel. Without the lock.
  template <typename Fn>
  void ForEach(Executor& ex, const std::vector<Run>& runs, const Fn& fn) const;

  // All others need the lock.
  // Batches begun since this one.
  uint32_t AgeOf(uint32_t batch) const { return (batch_ - batch) & kBatches; }
  // Whether a batch touched the block that is this one, the one before or under way.
  bool IsNeeded(const Block& block) const {
    const uint32_t oldest = under_way_.empty() ? 0 : AgeOf(under_way_.front());
    return AgeOf(block.batch) <= std::max<uint32_t>(1, oldest);
  }
  // Both append the blocks that are no longer here to `dropped`.
  void MakeRoom(int64_t num_blocks, std::vector<Run>* dropped);
  void DropLeaving(std::vector<Run>* dropped);
  // Moves the hand until `num_blocks` more blocks are leaving, or all others are needed.
  void Choose(int64_t num_blocks);
  void AddLeavingRuns(std::vector<Run>* runs);
  // The blocks are here from now on; returns those that are on the disk. Other blocks are zeros.
  std::vector<Run> TakeIn(const std::vector<int64_t>& blocks);
  void UnmapAround(const Run& run);

  RowFile& file_;
  const int64_t block_bytes_;
  const int shift_;      // log2 of block_bytes_
  const int64_t limit_;  // blocks
  const uint32_t most_counted_;
  mutable LeafMutex mutex_;
  std::vector<Block> blocks_;
  uint32_t batch_ = 2;
  std::vector<uint32_t> under_way_;  // batches that exist, oldest first
  int64_t num_here_ = 0;
  int64_t hand_ = 0;
  std::vector<int64_t> leaving_;  // some of them may have been touched since
  StorageStats stats_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_CACHE_H_
