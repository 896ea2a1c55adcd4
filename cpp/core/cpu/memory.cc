#include "cpp/core/cpu/memory.h"

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace sok {
namespace {

// Smaller blocks come from the heap: no system call, no rounding to pages.
constexpr size_t kMapFrom = size_t{64} << 10;
constexpr size_t kPageBytes = 4096;

#if defined(__linux__)
size_t RoundUp(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

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

void* BlockPool::Allocate(size_t bytes) {
  constexpr uint32_t kAll = (1u << kSlabBlocks) - 1;
  std::unique_lock<LeafMutex> lock(mutex_);
  Slab* slab = nullptr;
  for (const auto& candidate : slabs_) {
    if (candidate->block_bytes == bytes && candidate->used != kAll) slab = candidate.get();
  }
  if (slab == nullptr) {
    slabs_.reserve(slabs_.size() + 1);
    slab = new Slab{Memory(bytes * kSlabBlocks, true), bytes};
    slabs_.emplace_back(slab);
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
  const std::lock_guard<LeafMutex> lock(mutex_);
  for (auto& slab : slabs_) {
    const char* const begin = static_cast<const char*>(slab->memory.data());
    const char* const at = static_cast<const char*>(block);
    if (at < begin || at >= begin + slab->memory.bytes()) continue;
    slab->used &= ~(1u << (static_cast<size_t>(at - begin) / bytes));
    if (slab->used == 0) {
      std::swap(slab, slabs_.back());
      slabs_.pop_back();
    }
    return;
  }
}

}  // namespace sok
