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
  number_ = (cache_.batch_ + 1) & kBatches;
  cache_.under_way_.push_back(number_);
  cache_.batch_ = number_;
}

RowCache::Batch::~Batch() {
  if (!lock_.owns_lock()) lock_.lock();
  std::vector<uint32_t>& under_way = cache_.under_way_;
  under_way.erase(std::find(under_way.begin(), under_way.end(), number_));
}

void RowCache::Batch::TouchBlock(int64_t at) {
  Block& block = cache_.blocks_[at];
  block.is_dirty |= Writes(use_);
  if (block.batch == number_) return;
  block.batch = number_;
  if (!block.is_here) {
    absent_.push_back(at);
    return;
  }
  block.is_leaving = 0;
  if (!IsScan(use_) && block.count < cache_.most_counted_) ++block.count;
}

void RowCache::Batch::End(Executor& ex) {
  // A scan may leave more than limit_.
  if (absent_.empty() && cache_.num_here_ <= cache_.limit_) return;
  std::sort(absent_.begin(), absent_.end());
  cache_.file_.CheckWritten();  // what could not be written must not be read
  std::vector<Run> dropped;
  cache_.MakeRoom(static_cast<int64_t>(absent_.size()), &dropped);
  const std::vector<Run> runs = cache_.TakeIn(absent_);
  lock_.unlock();
  const RowFile& file = cache_.file_;
  const bool writes = Writes(use_);
  const auto each = [&](const std::vector<Run>& all, const auto& fn) {
    cache_.ForEach(ex, all, fn);
  };
  each(dropped, [&](int64_t offset, int64_t bytes) { file.Unmap(offset, bytes); });
  each(runs, [&](int64_t offset, int64_t bytes) { file.Fetch(offset, bytes); });
  each(runs, [&](int64_t offset, int64_t bytes) { file.Map(offset, bytes, writes); });
  lock_.lock();
  for (int64_t at : absent_) {
    Block& block = cache_.blocks_[at];
    if (!IsScan(use_) || block.batch != number_) continue;
    cache_.leaving_.push_back(at);  // dropped next: a scan must not displace what lookups need
    block.is_leaving = 1;
  }
  for (size_t i = 0; !writes && i < runs.size(); ++i) cache_.UnmapAround(runs[i]);
}

template <typename Fn>
void RowCache::ForEach(Executor& ex, const std::vector<Run>& runs, const Fn& fn) const {
  ex.ParallelFor(static_cast<int64_t>(runs.size()), kRunsGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      fn(runs[i].first * block_bytes_, (runs[i].last - runs[i].first + 1) * block_bytes_);
    }
  });
}

std::vector<RowCache::Run> RowCache::TakeIn(const std::vector<int64_t>& blocks) {
  std::vector<Run> runs;  // of neighbours
  for (int64_t at : blocks) {
    if (!blocks_[at].is_on_disk) continue;
    if (!runs.empty() && runs.back().last + 1 == at) {
      runs.back().last = at;
    } else {
      runs.push_back({at, at});
    }
    stats_.bytes_read += block_bytes_;
  }
  for (int64_t at : blocks) {
    blocks_[at].is_here = 1;
    blocks_[at].count = 0;  // only a second touch suggests that more will follow
  }
  num_here_ += static_cast<int64_t>(blocks.size());
  return runs;
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

void RowCache::MakeRoom(int64_t num_blocks, std::vector<Run>* dropped) {
  if (num_here_ + num_blocks > limit_) DropLeaving(dropped);
  if (num_here_ + num_blocks <= limit_) return;
  Choose(num_here_ + num_blocks - limit_);
  DropLeaving(dropped);
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
void RowCache::AddLeavingRuns(std::vector<Run>* runs) {
  leaving_.erase(std::remove_if(leaving_.begin(), leaving_.end(),
                                [this](int64_t at) { return !blocks_[at].is_leaving; }),
                 leaving_.end());
  std::sort(leaving_.begin(), leaving_.end());
  leaving_.erase(std::unique(leaving_.begin(), leaving_.end()), leaving_.end());
  const size_t first = runs->size();
  for (int64_t at : leaving_) {
    bool joins = runs->size() > first && at - runs->back().last <= kGap;
    for (int64_t b = joins ? runs->back().last + 1 : at; joins && b < at; ++b) {
      joins = !blocks_[b].is_here;
    }
    if (joins) {
      runs->back().last = at;
    } else {
      runs->push_back({at, at});
    }
  }
}

void RowCache::DropLeaving(std::vector<Run>* dropped) {
  AddLeavingRuns(dropped);
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
  const std::lock_guard<LeafMutex> lock(mutex_);
  const int64_t end =
      std::min<int64_t>((offset + bytes) / block_bytes_, static_cast<int64_t>(blocks_.size()));
  for (int64_t b = offset / block_bytes_; b < end; ++b) {
    num_here_ -= blocks_[b].is_here;
    blocks_[b] = Block{};
  }
}

StorageStats RowCache::Stats() const {
  const std::lock_guard<LeafMutex> lock(mutex_);
  StorageStats stats = stats_;
  stats.resident_bytes = num_here_ * block_bytes_;
  stats.file_bytes = file_.bytes();
  return stats;
}

}  // namespace sok
