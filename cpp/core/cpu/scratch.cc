#include "cpp/core/cpu/scratch.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace sok {
namespace {

constexpr size_t kMinPooledBytes = size_t{64} << 10;
constexpr size_t kMaxIdleBytes = size_t{128} << 20;

struct Block {
  void* data;
  size_t bytes;
};

struct Pool {
  std::mutex mutex;
  std::vector<Block> idle;
  size_t idle_bytes = 0;
};

// Never destroyed: a worker thread may still return a block while the process exits.
Pool& ThePool() {
  static Pool* const pool = new Pool;
  return *pool;
}

// Blocks come in powers of two and one and a half times those, so that calls of varying size find
// each other's blocks.
size_t RoundUp(size_t bytes) {
  size_t size = 64;
  while (size < bytes) size *= 2;
  return size >= 256 && size / 4 * 3 >= bytes ? size / 4 * 3 : size;
}

}  // namespace

void* AcquireScratch(size_t bytes) {
  const size_t size = RoundUp(bytes);
  if (size >= kMinPooledBytes) {
    Pool& pool = ThePool();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    // Backwards: the block released last is the warmest.
    for (size_t i = pool.idle.size(); i-- > 0;) {
      if (pool.idle[i].bytes != size) continue;
      void* const data = pool.idle[i].data;
      pool.idle.erase(pool.idle.begin() + static_cast<std::ptrdiff_t>(i));
      pool.idle_bytes -= size;
      return data;
    }
  }
  void* const data = std::aligned_alloc(64, size);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void ReleaseScratch(void* block, size_t bytes) noexcept {
  const size_t size = RoundUp(bytes);
  if (size >= kMinPooledBytes) {
    Pool& pool = ThePool();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.idle_bytes + size <= kMaxIdleBytes) {
      try {
        pool.idle.push_back({block, size});
        pool.idle_bytes += size;
        return;
      } catch (const std::bad_alloc&) {
        // Called by destructors: short of memory is the time to give the block back.
      }
    }
  }
  std::free(block);
}

}  // namespace sok
