// Scratch memory that batch calls reuse.
//
// A call on a large batch needs a few arrays of megabytes for a millisecond. malloc gives such
// blocks back to the system at once, and touching fresh pages again costs as much as the work
// itself. Freed blocks therefore wait in a short list for the next call, on any thread.
//
// Smaller blocks stay with their thread, which finds them in its cache: a lookup in a small table
// takes no longer than a few calls of malloc.
//
// Invariant: the list holds at most kMaxIdleBytes, and a thread at most two blocks of each size
// below 64 KiB (0.3 MB in all); the rest is freed. Cost: one mutex lock per block of 64 KiB or
// more.
#ifndef SOK_CORE_CPU_SCRATCH_H_
#define SOK_CORE_CPU_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace sok {

void* AcquireScratch(size_t bytes);  // throws std::bad_alloc; aligned to 64 bytes
void ReleaseScratch(void* block, size_t bytes) noexcept;

// An uninitialised array [n].
template <typename T>
class Scratch {
  static_assert(std::is_trivial<T>::value, "Scratch holds plain numbers: nothing is constructed");

 public:
  Scratch() = default;
  explicit Scratch(int64_t n)
      : bytes_(static_cast<size_t>(n) * sizeof(T)),
        data_(static_cast<T*>(AcquireScratch(bytes_))) {}
  ~Scratch() {
    if (data_ != nullptr) ReleaseScratch(data_, bytes_);
  }
  Scratch(Scratch&& other) noexcept : bytes_(other.bytes_), data_(other.data_) {
    other.data_ = nullptr;
  }
  Scratch& operator=(Scratch&& other) noexcept {
    const Scratch old(static_cast<Scratch&&>(*this));
    bytes_ = other.bytes_;
    data_ = other.data_;
    other.data_ = nullptr;
    return *this;
  }

  explicit operator bool() const { return data_ != nullptr; }
  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  size_t bytes_ = 0;
  T* data_ = nullptr;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_SCRATCH_H_
