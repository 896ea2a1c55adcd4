#include "cpp/core/cpu/scratch.h"

#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "cpp/core/parallel.h"

namespace sok {
namespace {

constexpr size_t kMinPooledBytes = size_t{64} << 10;
constexpr std::align_val_t kAlignment{64};
constexpr size_t kMaxIdleBytes = size_t{128} << 20;

struct Block {
  void* data;
  size_t bytes;
};

struct Pool {
  LeafMutex mutex;
  std::vector<Block> idle;
  size_t idle_bytes = 0;
};

// Never destroyed: a worker thread may still return a block while the process exits.
Pool& ThePool() {
  static Pool* const pool = new Pool;
  return *pool;
}

// Block sizes are powers of two and 1.5 times those, so that calls of varying size can use each
// other's blocks.
size_t RoundUp(size_t bytes) {
  size_t size = 64;
  while (size < bytes) size *= 2;
  return size >= 256 && size / 4 * 3 >= bytes ? size / 4 * 3 : size;
}

// Small blocks of one thread, two of each size. 64 bytes and up to kMinPooledBytes: sizes 64, 128,
// 192, 256, 384, ...
class SmallBlocks {
 public:
  ~SmallBlocks() {
    for (auto& blocks : idle_) {
      for (void*& block : blocks) {
        ::operator delete(block, kAlignment);
        block = nullptr;
      }
    }
    is_gone = true;
  }
  void* Take(size_t size) {
    for (void*& block : idle_[Class(size)]) {
      if (block != nullptr) return std::exchange(block, nullptr);
    }
    return nullptr;
  }
  bool Give(void* data, size_t size) {
    for (void*& block : idle_[Class(size)]) {
      if (block != nullptr) continue;
      block = data;
      return true;
    }
    return false;
  }
  static thread_local bool is_gone;  // the thread is ending; its other objects may outlive this one

 private:
  static int Class(size_t size) {
    const int power = 63 - __builtin_clzll(size);  // 6 for 64
    return 2 * (power - 6) + ((size & (size - 1)) != 0);
  }
  void* idle_[20][2] = {};  // up to 48 KiB
};
thread_local bool SmallBlocks::is_gone = false;
thread_local SmallBlocks small_blocks;

}  // namespace

void* AcquireScratch(size_t bytes) {
  const size_t size = RoundUp(bytes);
  if (size < kMinPooledBytes && !SmallBlocks::is_gone) {
    if (void* const data = small_blocks.Take(size)) return data;
  }
  if (size >= kMinPooledBytes) {
    Pool& pool = ThePool();
    const std::lock_guard<LeafMutex> lock(pool.mutex);
    // Backwards: the block released last is the warmest.
    for (size_t i = pool.idle.size(); i-- > 0;) {
      if (pool.idle[i].bytes != size) continue;
      void* const data = pool.idle[i].data;
      pool.idle.erase(pool.idle.begin() + static_cast<std::ptrdiff_t>(i));
      pool.idle_bytes -= size;
      return data;
    }
  }
  return ::operator new(size, kAlignment);
}

void ReleaseScratch(void* block, size_t bytes) noexcept {
  const size_t size = RoundUp(bytes);
  if (size < kMinPooledBytes && !SmallBlocks::is_gone && small_blocks.Give(block, size)) return;
  if (size >= kMinPooledBytes) {
    Pool& pool = ThePool();
    const std::lock_guard<LeafMutex> lock(pool.mutex);
    if (pool.idle_bytes + size <= kMaxIdleBytes) {
      try {
        pool.idle.push_back({block, size});
        pool.idle_bytes += size;
        return;
      } catch (const std::bad_alloc&) {
        // Destructors call this, so it must not throw: the block is freed instead.
      }
    }
  }
  ::operator delete(block, kAlignment);
}

}  // namespace sok
