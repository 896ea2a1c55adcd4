#include "cpp/core/cpu/row_cache.h"

#include <algorithm>

namespace sok {
namespace {

constexpr uint32_t kLfuCount = 7;
constexpr int64_t kGap = 64;        // a run may skip this many blocks that are not here
constexpr int64_t kAround = 16;     // blocks, a power of two: Linux' fault_around_bytes
constexpr int64_t kRunsGrain = 16;  // runs worth another thread: each takes a system call or more

bool IsScan(RowUse use) { return use == RowUse::kScan || use == RowUse::kScanWrite; }
bool Writes(RowUse use) { return use == RowUse::kWrite || use == RowUse::kScanWrite; }

}  // namespace

RowCache::RowCache(RowFile* file, const StorageOptions& storage)
    : file_(*file),
      block_bytes_(RowBlockBytes()),
      shift_(__builtin_ctzll(static_cast<uint64_t>(block_bytes_))),
      limit_(storage.memory_bytes / block_bytes_),
      most_counted_(storage.lfu ? kLfuCount : 1) {}

RowCache::Batch::Batch(RowCache* cache, RowUse use, int64_t bytes)
    : cache_(*cache), use_(use), lock_(cache->mutex_) {
  const size_t num_blocks = static_cast<size_t>(bytes / cache_.block_bytes_);
  if (num_blocks > cache_.blocks_.size()) cache_.blocks_.resize(num_blocks, Block{});
  cache_.absent_.clear();
  cache_.batch_ = (cache_.batch_ + 1) & kBatches;
}

void RowCache::TouchBlock(int64_t at, RowUse use) {
  Block& block = blocks_[at];
  block.is_dirty |= Writes(use);
  if (block.batch == batch_) return;
  block.batch = batch_;
  if (!block.is_here) {
    absent_.push_back(at);
    return;
  }
  block.is_leaving = 0;
  if (!IsScan(use) && block.count < most_counted_) ++block.count;
}

template <typename Fn>
void RowCache::ForEach(Executor& ex, const std::vector<Run>& runs, const Fn& fn) const {
  ex.ParallelFor(static_cast<int64_t>(runs.size()), kRunsGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      fn(runs[i].first * block_bytes_, (runs[i].last - runs[i].first + 1) * block_bytes_);
    }
  });
}

void RowCache::Bring(Executor& ex, RowUse use) {
  if (absent_.empty() && num_here_ <= limit_) return;  // a scan may leave more than limit_
  std::sort(absent_.begin(), absent_.end());
  const int64_t num_absent = static_cast<int64_t>(absent_.size());
  file_.CheckWritten();  // what could not be written must not be read
  MakeRoom(ex, num_absent);
  std::vector<Run> runs;  // of neighbours that are on the disk; other blocks are zeros
  for (int64_t at : absent_) {
    if (!blocks_[at].is_on_disk) continue;
    if (!runs.empty() && runs.back().last + 1 == at) {
      runs.back().last = at;
    } else {
      runs.push_back({at, at});
    }
    stats_.bytes_read += block_bytes_;
  }
  for (int64_t at : absent_) {
    Block& block = blocks_[at];
    block.is_here = 1;
    block.count = 0;  // only a second touch suggests that more will follow
    if (!IsScan(use)) continue;
    block.is_leaving = 1;  // dropped next: a scan must not displace what lookups need
    leaving_.push_back(at);
  }
  num_here_ += num_absent;
  ForEach(ex, runs, [&](int64_t offset, int64_t bytes) { file_.Fetch(offset, bytes); });
  ForEach(ex, runs, [&](int64_t offset, int64_t bytes) { file_.Map(offset, bytes, Writes(use)); });
  if (Writes(use)) return;
  for (const Run& run : runs) UnmapAround(run);
}

// When Linux maps a page for reading, it also maps neighbours that are in its page cache.
void RowCache::UnmapAround(const Run& run) {
  const int64_t end =
      std::min<int64_t>(static_cast<int64_t>(blocks_.size()), (run.last | (kAround - 1)) + 1);
  int64_t absent = 0;  // blocks before `at` that are not here
  for (int64_t at = run.first / kAround * kAround; at <= end; ++at) {
    if (at < end && !blocks_[at].is_here) {
      ++absent;
    } else if (absent > 0) {
      file_.Unmap((at - absent) * block_bytes_, absent * block_bytes_);
      absent = 0;
    }
  }
}

void RowCache::MakeRoom(Executor& ex, int64_t num_blocks) {
  if (num_here_ + num_blocks > limit_) DropLeaving(ex);
  if (num_here_ + num_blocks <= limit_) return;
  Choose(num_here_ + num_blocks - limit_);
  DropLeaving(ex);
}

void RowCache::Choose(int64_t num_blocks) {
  const int64_t size = static_cast<int64_t>(blocks_.size());
  for (int64_t moves = (most_counted_ + int64_t{2}) * size; moves > 0 && num_blocks > 0; --moves) {
    if (hand_ >= size) hand_ = 0;
    const int64_t at = hand_++;
    Block& block = blocks_[at];
    if (!block.is_here || block.is_leaving || IsNeeded(block)) continue;
    if (block.count > 0) {
      --block.count;
      continue;
    }
    block.is_leaving = 1;
    leaving_.push_back(at);
    --num_blocks;
  }
}

// The leaving blocks as few ranges of the file: blocks that are not here do not split a range.
std::vector<RowCache::Run> RowCache::LeavingRuns() {
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(),
                                [this](int64_t at) { return !blocks_[at].is_leaving; }),
                 leaving_.end());
  std::sort(leaving_.begin(), leaving_.end());
  leaving_.erase(std::unique(leaving_.begin(), leaving_.end()), leaving_.end());
  std::vector<Run> runs;
  for (int64_t at : leaving_) {
    bool joins = !runs.empty() && at - runs.back().last <= kGap;
    for (int64_t b = joins ? runs.back().last + 1 : at; joins && b < at; ++b) {
      joins = !blocks_[b].is_here;
    }
    if (joins) {
      runs.back().last = at;
    } else {
      runs.push_back({at, at});
    }
  }
  return runs;
}

void RowCache::DropLeaving(Executor& ex) {
  ForEach(ex, LeavingRuns(), [&](int64_t offset, int64_t bytes) { file_.Unmap(offset, bytes); });
  for (int64_t at : leaving_) {
    Block& block = blocks_[at];
    if (block.is_dirty) {
      block.is_on_disk = 1;
      stats_.bytes_written += block_bytes_;
    }
    block.is_dirty = block.is_here = block.is_leaving = 0;
  }
  num_here_ -= static_cast<int64_t>(leaving_.size());
  stats_.blocks_evicted += static_cast<int64_t>(leaving_.size());
  leaving_.clear();
}

void RowCache::Forget(int64_t offset, int64_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t end =
      std::min<int64_t>((offset + bytes) / block_bytes_, static_cast<int64_t>(blocks_.size()));
  for (int64_t b = offset / block_bytes_; b < end; ++b) {
    num_here_ -= blocks_[b].is_here;
    blocks_[b] = Block{};
  }
}

StorageStats RowCache::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  StorageStats stats = stats_;
  stats.resident_bytes = num_here_ * block_bytes_;
  stats.file_bytes = file_.bytes();
  return stats;
}

}  // namespace sok
