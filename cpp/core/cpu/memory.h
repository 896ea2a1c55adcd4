// Host memory straight from the operating system.
//
// Large blocks are mapped: their pages cost nothing until they are touched, read as zero at first,
// and go back to the system when freed. With huge pages a block of 2 MiB takes one TLB entry
// instead of 512, which is a third of the time of random lookups in a large table.
#ifndef SOK_CORE_CPU_MEMORY_H_
#define SOK_CORE_CPU_MEMORY_H_

#include <cstddef>
#include <utility>

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

}  // namespace sok

#endif  // SOK_CORE_CPU_MEMORY_H_
