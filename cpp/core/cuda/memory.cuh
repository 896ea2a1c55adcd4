// How probes read and write the index in device memory: the two `Memory` of probe.h.
#ifndef SOK_CORE_CUDA_MEMORY_CUH_
#define SOK_CORE_CUDA_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cuda/atomic>

#include "cpp/core/cuda/bucket.h"
#include "cpp/core/cuda/launch.cuh"

namespace sok {
namespace cuda {

// For kernels beside which nothing writes to the index: plain loads, the digests in one of 16
// bytes. The key and the row number of a slot are asked for together.
struct ReadOnlyMemory {
  SOK_DEVICE DigestWords Digests(const Bucket* bucket) const {
    const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(bucket->digests);
    return {words.x, words.y};
  }
  SOK_DEVICE uint32_t Row(const Bucket* bucket, int slot) const { return bucket->rows[slot]; }
  SOK_DEVICE uint64_t Key(const Bucket* bucket, int slot) const { return bucket->keys[slot]; }
};

// For kernels whose threads insert or erase. Digests come from the L2 cache, where the swaps
// happen: a line kept in L1 might be looked at for ever.
struct ContendedMemory {
  template <typename T>
  using Atomic = ::cuda::atomic_ref<T, ::cuda::thread_scope_device>;

  SOK_DEVICE DigestWords Digests(const Bucket* bucket) const {
    const ulonglong2 words = __ldcg(reinterpret_cast<const ulonglong2*>(bucket->digests));
    return {words.x, words.y};
  }
  SOK_DEVICE uint32_t Row(const Bucket* bucket, int slot) const {
    return Atomic<uint32_t>(const_cast<Bucket*>(bucket)->rows[slot])
        .load(::cuda::memory_order_acquire);
  }
  SOK_DEVICE uint64_t Key(const Bucket* bucket, int slot) const {
    return Atomic<uint64_t>(const_cast<Bucket*>(bucket)->keys[slot])
        .load(::cuda::memory_order_relaxed);
  }
  SOK_DEVICE bool Claim(Bucket* bucket, int word, uint32_t expected, uint32_t desired) const {
    return Atomic<uint32_t>(bucket->digests[word])
        .compare_exchange_strong(expected, desired, ::cuda::memory_order_relaxed);
  }
  SOK_DEVICE void Publish(Bucket* bucket, int slot, uint64_t key, uint32_t row) const {
    Atomic<uint64_t>(bucket->keys[slot]).store(key, ::cuda::memory_order_relaxed);
    Atomic<uint32_t>(bucket->rows[slot]).store(row, ::cuda::memory_order_release);
  }
  SOK_DEVICE uint32_t TakeRow(Bucket* bucket, int slot) const {
    return Atomic<uint32_t>(bucket->rows[slot]).exchange(0u, ::cuda::memory_order_relaxed);
  }
  SOK_DEVICE void MarkErased(Bucket* bucket, int slot) const {
    const Atomic<uint32_t> word(bucket->digests[slot / 4]);
    const int shift = slot % 4 * 8;
    word.fetch_or(uint32_t{kErasedDigest} << shift, ::cuda::memory_order_relaxed);
    word.fetch_and(~(uint32_t{0xFE} << shift), ::cuda::memory_order_relaxed);
  }
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_MEMORY_CUH_
