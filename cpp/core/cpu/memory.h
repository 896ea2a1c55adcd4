// Host memory straight from the operating system.
//
// Large blocks are mapped: their pages cost nothing until they are touched, read as zero at first,
// and go back to the system when freed. With huge pages a block of 2 MiB takes one TLB entry
// instead of 512, which saves a third of the time of random lookups in a large table.
#ifndef SOK_CORE_CPU_MEMORY_H_
#define SOK_CORE_CPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cpp/core/parallel.h"

namespace sok {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// A block of zeroed bytes, aligned to 64 bytes (to kHugePageBytes when `huge`).
class Memory {
 public:
  Memory() = default;
  Memory(size_t bytes, bool huge);  // throws std::bad_alloc
  ~Memory() { Free(); }
  Memory(Memory&& other) noexcept { Swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    Swap(other);
    return *this;
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  bool is_mapped() const { return mapped_; }
  // Enlarges a block that is not huge. The bytes stay: where the system can move pages, none is
  // copied or touched. Throws std::bad_alloc, changing nothing.
  void Grow(size_t bytes);
  // The content is lost: bytes are what they were or zero. The system takes pages if it needs them;
  // those that it has not taken when they are next written cost nothing.
  void Offer() noexcept;
  void Free() noexcept;
  // Cuts off all behind the first `bytes`, a multiple of pages, of a mapped block.
  Memory Split(size_t bytes) noexcept;
  // Joins the block that begins where this one ends.
  void Join(Memory next) noexcept;

 private:
  void Swap(Memory& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool mapped_ = false;
};

// The huge pages of one table, in blocks of whole pages or in small blocks that share one or three.
//
// An index shard is too small for huge pages. But keys spread evenly, so the shards of a table are
// of two sizes: together they fill pages.
//
// What a table frees it takes again: the arrays that its index outgrows become rows, and after Clear
// or a restore the new content takes the old one's memory. The system would clear each page anew,
// which takes a fifth of the time of an insert, and up to two thirds where a host must bring the page.
// The system may take what is kept (Memory::Offer). Blocks kept and blocks in use are never more than
// the table has once used at a time, so a table that only grows keeps next to nothing. Thread-safe.
class BlockPool {
 public:
  // At least `bytes`, aligned to kHugePageBytes; sets *is_zeroed. Throws std::bad_alloc.
  Memory Take(size_t bytes, bool* is_zeroed);
  void Give(Memory block, bool keeps = true) noexcept;
  // 2^n or 3 * 2^n, not a multiple of kHugePageBytes, at least a 32nd of it.
  void* Allocate(size_t bytes);  // zeroed; throws std::bad_alloc
  void Free(void* block, size_t bytes) noexcept;
  int64_t idle_bytes() const;  // of freed small blocks in pages that are still in use
  int64_t kept_bytes() const;

 private:
  struct Slab {
    Memory memory;
    size_t block_bytes;
    uint32_t used = 0;     // one bit per block
    uint32_t touched = 0;  // blocks that may no longer read as zero
  };
  using Kept = std::map<char*, Memory>;
  Memory TakeLocked(size_t bytes, bool* is_zeroed);
  Kept::iterator Fitting(size_t bytes);
  static size_t Offset(const Memory& memory, const void* block);

  mutable LeafMutex mutex_;
  std::vector<std::unique_ptr<Slab>> slabs_;
  Kept kept_;  // by address, neighbours joined
  size_t used_bytes_ = 0, kept_bytes_ = 0, most_used_bytes_ = 0;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_MEMORY_H_
