// PlainArray: an array of plain values that grows without copying them.
//
// A std::vector that doubles copies all its values into new pages while a lookup waits: 0.2 s and
// more at 8 million keys. Here the system moves the pages (Memory::Grow).
#ifndef SOK_CORE_CPU_PLAIN_ARRAY_H_
#define SOK_CORE_CPU_PLAIN_ARRAY_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpp/core/cpu/memory.h"

namespace sok {

template <typename T>
class PlainArray {
  static_assert(std::is_trivially_copyable_v<T>, "values move with their pages");

 public:
  int64_t size() const { return size_; }
  int64_t bytes() const { return static_cast<int64_t>(memory_.bytes()); }
  T* begin() { return static_cast<T*>(memory_.data()); }
  T* end() { return begin() + size_; }
  T& operator[](int64_t i) { return begin()[i]; }
  const T& operator[](int64_t i) const { return static_cast<const T*>(memory_.data())[i]; }

  // Throws std::bad_alloc, changing nothing.
  void Reserve(int64_t capacity) {
    if (capacity <= capacity_) return;
    capacity = std::max(capacity, capacity_ + capacity_ / 2);
    memory_.Grow(static_cast<size_t>(capacity) * sizeof(T));
    capacity_ = static_cast<int64_t>(memory_.bytes() / sizeof(T));
  }
  void Resize(int64_t size, const T& value = T()) {
    Reserve(size);
    for (; size_ < size; ++size_) begin()[size_] = value;
    size_ = size;
  }
  // Reserve must have made room.
  void Push(const T& value) noexcept { begin()[size_++] = value; }
  void Pop() noexcept { --size_; }
  void Clear() noexcept {
    memory_.Free();
    size_ = capacity_ = 0;
  }

 private:
  Memory memory_;
  int64_t size_ = 0, capacity_ = 0;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_PLAIN_ARRAY_H_
