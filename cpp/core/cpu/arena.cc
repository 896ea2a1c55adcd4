#include "cpp/core/cpu/arena.h"

#include <algorithm>

namespace sok {
namespace {

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Whole cache lines when that wastes no more than an eighth: a row then takes the fewest lines.
int64_t StrideOf(int64_t row_floats) {
  const int64_t lines = RoundUp(row_floats, 16);
  return (lines - row_floats) * 8 <= lines ? lines : RoundUp(row_floats, 4);
}

}  // namespace

Arena::Arena(int64_t row_floats) : stride_(StrideOf(row_floats)), shift_(0) {
  while ((stride_ * 4) << shift_ < static_cast<int64_t>(kHugePageBytes)) ++shift_;
  mask_ = static_cast<uint32_t>((int64_t{1} << shift_) - 1);
}

void Arena::AddChunk(size_t chunk) {
  // Everything that can throw comes first, so that the two vectors cannot differ.
  if (chunk >= chunks_.capacity()) chunks_.reserve(std::max(chunk + 1, chunks_.size() * 2));
  if (chunk >= base_.capacity()) base_.reserve(std::max(chunk + 1, base_.size() * 2));
  Memory memory(static_cast<size_t>(stride_ * 4) << shift_, chunk > 0);
  if (chunk >= chunks_.size()) {
    chunks_.resize(chunk + 1);
    base_.resize(chunk + 1, nullptr);
  }
  bytes_ += static_cast<int64_t>(memory.bytes());
  base_[chunk] = static_cast<float*>(memory.data());
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
  bytes_ -= static_cast<int64_t>(chunks_[chunk].bytes());
  base_[chunk] = nullptr;
  chunks_[chunk].Free();
}

void Arena::Clear() noexcept {
  chunks_.clear();
  base_.clear();
  bytes_ = 0;
}

}  // namespace sok
