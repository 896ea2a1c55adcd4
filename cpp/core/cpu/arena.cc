#include "cpp/core/cpu/arena.h"

#include <algorithm>

#include "cpp/core/hash.h"

namespace sok {
namespace {

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Whole cache lines if that wastes at most an eighth: a row then touches the fewest lines.
int64_t StrideOf(int64_t row_floats) {
  const int64_t lines = RoundUp(row_floats, 16);
  return (lines - row_floats) * 8 <= lines ? lines : RoundUp(row_floats, 4);
}

}  // namespace

Arena::Arena(int64_t row_floats, const StorageOptions& storage, const std::string& table,
             BlockPool* pool)
    : pool_(storage.is_used() ? nullptr : pool), stride_(StrideOf(row_floats)), shift_(0) {
  while ((stride_ * 4) << shift_ < static_cast<int64_t>(kHugePageBytes)) ++shift_;
  mask_ = static_cast<uint32_t>((int64_t{1} << shift_) - 1);
  if (!storage.is_used()) return;
  file_ = std::make_unique<RowFile>(storage, table, (stride_ * 4) << shift_);
  cache_ = std::make_unique<RowCache>(file_.get(), storage);
  const int64_t row_bytes = RoundUp(stride_ * 4, RowBlockBytes()) + RowBlockBytes();  // at most
  part_rows_ = std::max<int64_t>(64, storage.memory_bytes / row_bytes / 2);
}

void Arena::AddChunk(size_t chunk) {
  // Everything that can throw comes first, so that the two vectors stay equally long.
  if (chunk >= chunks_.capacity()) chunks_.reserve(std::max(chunk + 1, chunks_.size() * 2));
  if (chunk >= base_.capacity()) base_.reserve(std::max(chunk + 1, base_.size() * 2));
  Memory memory;
  float* rows;
  int64_t bytes;
  if (file_ != nullptr) {
    rows = file_->AddChunk(chunk);
    bytes = file_->chunk_bytes();
  } else {
    const size_t size = static_cast<size_t>(stride_ * 4) << shift_;
    bool is_zeroed;  // no matter: rows are written before they are read
    memory = pool_ != nullptr && chunk > 0 ? pool_->Take(size, &is_zeroed)
                                           : Memory(size, /*huge=*/chunk > 0);
    rows = static_cast<float*>(memory.data());
    bytes = static_cast<int64_t>(memory.bytes());
  }
  if (chunk >= chunks_.size()) {
    chunks_.resize(chunk + 1);
    base_.resize(chunk + 1, nullptr);
  }
  bytes_ += bytes;
  base_[chunk] = rows;
  chunks_[chunk] = std::move(memory);
}

void Arena::Reserve(int64_t num_rows) {
  const size_t wanted = static_cast<size_t>((num_rows + chunk_rows() - 1) >> shift_);
  for (size_t chunk = chunks_.size(); chunk < wanted; ++chunk) AddChunk(chunk);
}

void Arena::ReserveRow(uint32_t row) {
  if (!HasRow(row)) AddChunk(row >> shift_);
}

void Arena::FreeChunk(int64_t chunk) noexcept {
  base_[chunk] = nullptr;
  if (file_ != nullptr) {
    cache_->Forget(chunk * file_->chunk_bytes(), file_->chunk_bytes());
    file_->FreeChunk(static_cast<size_t>(chunk));
    bytes_ -= file_->chunk_bytes();
    return;
  }
  bytes_ -= static_cast<int64_t>(chunks_[chunk].bytes());
  Memory freed = std::move(chunks_[chunk]);
  if (pool_ != nullptr && chunk > 0) pool_->Give(std::move(freed), /*keeps=*/false);
}

void Arena::BringListed(Executor& ex, const uint32_t* rows, int64_t num_rows, RowUse use) const {
  RowCache::Batch batch(cache_.get(), use, FileBytes());
  const int64_t chunk_bytes = file_->chunk_bytes(), row_bytes = stride_ * 4;
  for (int64_t i = 0; i < num_rows; ++i) {
    const uint32_t row = rows[i];
    if (row == kNoRow || !HasRow(row)) continue;
    batch.Touch((row >> shift_) * chunk_bytes + (row & mask_) * row_bytes, row_bytes);
  }
  batch.End(ex);
}

void Arena::BringRange(Executor& ex, int64_t first, int64_t num_rows, RowUse use) const {
  if (cache_ == nullptr || num_rows <= 0) return;
  RowCache::Batch batch(cache_.get(), use, FileBytes());
  const int64_t chunk_bytes = file_->chunk_bytes(), row_bytes = stride_ * 4;
  for (int64_t row = first; row < first + num_rows;) {
    const int64_t end = std::min(first + num_rows, (row >> shift_ << shift_) + chunk_rows());
    if (HasRow(static_cast<uint32_t>(row))) {
      batch.Touch((row >> shift_) * chunk_bytes + (row & mask_) * row_bytes,
                  (end - row) * row_bytes);
    }
    row = end;
  }
  batch.End(ex);
}

StorageStats Arena::storage_stats() const {
  return cache_ == nullptr ? StorageStats() : cache_->Stats();
}

void Arena::Clear() noexcept {
  if (file_ != nullptr) {  // which then has no chunks in memory
    for (size_t chunk = 0; chunk < base_.size(); ++chunk) {
      if (base_[chunk] != nullptr) FreeChunk(static_cast<int64_t>(chunk));
    }
  }
  GiveBack();
  const bool has_first = pool_ != nullptr && !chunks_.empty() && chunks_[0].bytes() > 0;
  chunks_.resize(has_first);
  base_.resize(has_first);
  bytes_ = has_first ? static_cast<int64_t>(chunks_[0].bytes()) : 0;
  if (has_first) chunks_[0].Offer();
}

Arena::~Arena() { GiveBack(); }

void Arena::GiveBack() noexcept {
  for (size_t chunk = 1; pool_ != nullptr && chunk < chunks_.size(); ++chunk) {
    if (base_[chunk] != nullptr) pool_->Give(std::move(chunks_[chunk]));
  }
}

void Arena::Keep(int64_t num_rows) noexcept {
  const auto kept = static_cast<size_t>((num_rows + chunk_rows() - 1) >> shift_);
  while (chunks_.size() > kept) {
    bytes_ -= static_cast<int64_t>(chunks_.back().bytes());
    chunks_.pop_back();
    base_.pop_back();
  }
  for (Memory& chunk : chunks_) chunk.Offer();
}

}  // namespace sok
