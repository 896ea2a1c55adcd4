#include "cpp/core/cpu/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sok {
namespace {

// Smaller blocks come from the heap: no system call, no rounding to pages.
constexpr size_t kMapFrom = size_t{64} << 10;
constexpr size_t kPageBytes = 4096;

size_t RoundUp(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

#if defined(__linux__)
void* Map(size_t bytes, bool huge) {
  const size_t slack = huge ? kHugePageBytes - kPageBytes : 0;
  void* const base = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  if (!huge) return base;
  char* const begin = static_cast<char*>(base);
  const size_t head =
      (kHugePageBytes - reinterpret_cast<uintptr_t>(base) % kHugePageBytes) % kHugePageBytes;
  if (head > 0) munmap(begin, head);
  if (slack > head) munmap(begin + head + bytes, slack - head);
  madvise(begin + head, bytes, MADV_HUGEPAGE);  // only advice: if refused, pages are small
  return begin + head;
}
#endif

}  // namespace

Memory::Memory(size_t bytes, bool huge) : bytes_(bytes) {
  if (bytes == 0) return;
#if defined(__linux__)
  if (huge || bytes >= kMapFrom) {
    bytes_ = RoundUp(bytes, kPageBytes);
    data_ = Map(bytes_, huge);
    mapped_ = data_ != nullptr;
    if (mapped_) return;
  }
#endif
  data_ = ::operator new(bytes_, std::align_val_t{64});
  std::memset(data_, 0, bytes_);
}

void Memory::Grow(size_t bytes) {
#if defined(__linux__)
  if (mapped_) {
    const size_t rounded = RoundUp(bytes, kPageBytes);
    void* const moved = mremap(data_, bytes_, rounded, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) throw std::bad_alloc();
    data_ = moved;
    bytes_ = rounded;
    return;
  }
#endif
  Memory grown(bytes, /*huge=*/false);
  if (bytes_ > 0) std::memcpy(grown.data_, data_, bytes_);
  Swap(grown);
}

void Memory::Offer() noexcept {
#if defined(__linux__) && defined(MADV_FREE)
  if (mapped_) madvise(data_, bytes_, MADV_FREE);
#endif
}

void Memory::Free() noexcept {
#if defined(__linux__)
  if (mapped_) {
    munmap(data_, bytes_);
  } else
#endif
      if (data_ != nullptr) {
    ::operator delete(data_, std::align_val_t{64});
  }
  data_ = nullptr;
  bytes_ = 0;
  mapped_ = false;
}

Memory Memory::Split(size_t bytes) noexcept {
  Memory rest;
  rest.data_ = static_cast<char*>(data_) + bytes;
  rest.bytes_ = bytes_ - bytes;
  rest.mapped_ = true;
  bytes_ = bytes;
  return rest;
}

void Memory::Join(Memory next) noexcept {
  bytes_ += next.bytes_;
  next.data_ = nullptr;
  next.mapped_ = false;
}

// The smallest kept block that holds `bytes` and leaves whole huge pages. There are few: blocks of
// whole pages lie beside each other and are joined, others are of one size.
BlockPool::Kept::iterator BlockPool::Fitting(size_t bytes) {
  auto best = kept_.end();
  for (auto it = kept_.begin(); it != kept_.end(); ++it) {
    const size_t size = it->second.bytes();
    if (size == bytes) return it;
    if (size < bytes || size % kHugePageBytes != 0 || bytes % kHugePageBytes != 0) continue;
    if (best == kept_.end() || size < best->second.bytes()) best = it;
  }
  return best;
}

Memory BlockPool::Take(size_t bytes, bool* is_zeroed) {
  const std::lock_guard<LeafMutex> lock(mutex_);
  return TakeLocked(RoundUp(bytes, kPageBytes), is_zeroed);
}

Memory BlockPool::TakeLocked(size_t bytes, bool* is_zeroed) {
  Memory block;
  const auto it = Fitting(bytes);
  *is_zeroed = it == kept_.end();
  if (*is_zeroed) {
    block = Memory(bytes, /*huge=*/true);
  } else if (it->second.bytes() == bytes) {
    block = std::move(it->second);
    kept_.erase(it);
  } else {  // its end: then the key stays
    block = it->second.Split(it->second.bytes() - bytes);
  }
  if (!*is_zeroed) kept_bytes_ -= bytes;
  used_bytes_ += bytes;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
  while (used_bytes_ + kept_bytes_ > most_used_bytes_) {
    const size_t excess = RoundUp(used_bytes_ + kept_bytes_ - most_used_bytes_, kHugePageBytes);
    const auto last = std::prev(kept_.end());
    const size_t size = last->second.bytes(), cut = std::min(size, excess);
    if (cut < size && size % kHugePageBytes == 0) {
      last->second.Split(size - cut).Free();
      kept_bytes_ -= cut;
    } else {
      kept_.erase(last);
      kept_bytes_ -= size;
    }
  }
  return block;
}

void BlockPool::Give(Memory block, bool keeps) noexcept {
  const size_t bytes = block.bytes();
  keeps &= block.is_mapped();
  if (keeps) block.Offer();
  const std::lock_guard<LeafMutex> lock(mutex_);
  used_bytes_ -= bytes;
  if (!keeps) return;  // it is freed
  char* const begin = static_cast<char*>(block.data());
  const auto next = kept_.find(begin + bytes);
  const auto is_whole = [](const Memory& memory) { return memory.bytes() % kHugePageBytes == 0; };
  try {
    auto it = kept_.try_emplace(begin).first;
    it->second = std::move(block);
    kept_bytes_ += bytes;
    if (!is_whole(it->second)) return;  // joined, it would fit nothing
    if (next != kept_.end() && is_whole(next->second)) {
      it->second.Join(std::move(next->second));
      kept_.erase(next);
    }
    if (it == kept_.begin()) return;
    const auto before = std::prev(it);
    if (before->first + before->second.bytes() != begin) return;
    before->second.Join(std::move(it->second));
    kept_.erase(it);
  } catch (const std::bad_alloc&) {
    // It is freed instead.
  }
}

int64_t BlockPool::kept_bytes() const {
  const std::lock_guard<LeafMutex> lock(mutex_);
  return static_cast<int64_t>(kept_bytes_);
}

// Of a block in `memory`; anything large for others.
size_t BlockPool::Offset(const Memory& memory, const void* block) {
  return reinterpret_cast<uintptr_t>(block) - reinterpret_cast<uintptr_t>(memory.data());
}

void* BlockPool::Allocate(size_t bytes) {
  const size_t slab_bytes = bytes % 3 == 0 ? 3 * kHugePageBytes : kHugePageBytes;
  const uint32_t all = static_cast<uint32_t>((uint64_t{1} << (slab_bytes / bytes)) - 1);
  std::unique_lock<LeafMutex> lock(mutex_);
  Slab* slab = nullptr;
  for (const auto& candidate : slabs_) {
    if (candidate->block_bytes == bytes && candidate->used != all) slab = candidate.get();
  }
  if (slab == nullptr) {
    slabs_.reserve(slabs_.size() + 1);
    auto fresh = std::make_unique<Slab>();
    slab = fresh.get();
    bool is_zeroed;
    slab->memory = TakeLocked(slab_bytes, &is_zeroed);
    slab->block_bytes = bytes;
    slab->touched = is_zeroed ? 0 : all;
    slabs_.push_back(std::move(fresh));
  }
  const int i = __builtin_ctz(~slab->used);
  const uint32_t bit = 1u << i;
  slab->used |= bit;
  const bool touched = (slab->touched & bit) != 0;
  slab->touched |= bit;
  lock.unlock();
  char* const block = static_cast<char*>(slab->memory.data()) + static_cast<size_t>(i) * bytes;
  if (touched) std::memset(block, 0, bytes);
  return block;
}

int64_t BlockPool::idle_bytes() const {
  const std::lock_guard<LeafMutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& slab : slabs_) {
    bytes +=
        __builtin_popcount(slab->touched & ~slab->used) * static_cast<int64_t>(slab->block_bytes);
  }
  return bytes;
}

void BlockPool::Free(void* block, size_t bytes) noexcept {
  Memory page;
  {
    const std::lock_guard<LeafMutex> lock(mutex_);
    const auto slab = std::find_if(slabs_.begin(), slabs_.end(), [block](const auto& candidate) {
      return Offset(candidate->memory, block) < candidate->memory.bytes();
    });
    (*slab)->used &= ~(1u << (Offset((*slab)->memory, block) / bytes));
    if ((*slab)->used > 0) return;
    page = std::move((*slab)->memory);
    std::swap(*slab, slabs_.back());
    slabs_.pop_back();
  }
  Give(std::move(page));
}

}  // namespace sok
