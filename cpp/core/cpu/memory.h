// Host memory straight from the operating system.
//
// Large blocks are mapped: their pages cost nothing until they are touched, read as zero at first,
// and go back to the system when freed. With huge pages a block of 2 MiB takes one TLB entry
// instead of 512, which saves a third of the time of random lookups in a large table.
#ifndef SOK_CORE_CPU_MEMORY_H_
#define SOK_CORE_CPU_MEMORY_H_

#include <cstddef>
#include <cstdint>
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
  // Enlarges a block that is not huge. The bytes stay: where the system can move pages, none is
  // copied or touched. Throws std::bad_alloc, changing nothing.
  void Grow(size_t bytes);
  // The content is lost: bytes are what they were or zero. The system takes pages if it needs them;
  // those that it has not taken when they are next written cost nothing.
  void Offer() noexcept;
  void Free() noexcept;

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

// Blocks of equal size, cut from slabs of huge pages. An index shard is too small for huge pages.
// But keys spread evenly, so the shards of a table are of one size and double at about the same
// time: together they fill a slab, which is freed with its last block. Thread-safe.
class BlockPool {
 public:
  void* Allocate(size_t bytes);  // zeroed; throws std::bad_alloc
  void Free(void* block, size_t bytes) noexcept;
  int64_t idle_bytes() const;  // of freed blocks in slabs that are still in use

 private:
  static constexpr int kSlabBlocks = 16;
  struct Slab {
    Memory memory;
    size_t block_bytes;
    uint32_t used = 0;     // one bit per block
    uint32_t touched = 0;  // blocks that may no longer read as zero
  };
  mutable LeafMutex mutex_;
  std::vector<std::unique_ptr<Slab>> slabs_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_MEMORY_H_
