// How probes read and write the index in device memory: the two `Memory` of probe.h.
#ifndef SOK_CORE_CUDA_INDEX_BUCKET_MEMORY_CUH_
#define SOK_CORE_CUDA_INDEX_BUCKET_MEMORY_CUH_

#include <cuda_runtime.h>

#include <cuda/atomic>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/index/bucket.h"

namespace sok {
namespace cuda {

// For kernels during which nothing writes to the index: read-only loads, the digests in one load of
// 16 bytes. The row number of a slot is loaded together with its key, before the keys are compared.
// Left to itself, the compiler would load it after the comparison, one memory latency later.
struct ReadOnlyMemory {
  SOK_DEVICE DigestWords Digests(const Bucket* bucket) const {
    const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(bucket->digests);
    return {words.x, words.y};
  }
  SOK_DEVICE uint32_t Row(const Bucket* bucket, int slot) const {
#ifdef __CUDA_ARCH__
    uint32_t row;
    asm volatile("ld.global.nc.u32 %0, [%1];"
                 : "=r"(row)
                 : "l"(__cvta_generic_to_global(&bucket->rows[slot])));
    return row;
#else
    return bucket->rows[slot];
#endif
  }
  SOK_DEVICE uint64_t Key(const Bucket* bucket, int slot) const { return bucket->keys[slot]; }
};

// For kernels whose threads insert or erase. All words are read in the L2 cache, where the swaps
// happen: a stale line in L1 might be read forever. Acquire loads are used only where needed, since
// the hardware invalidates all of L1 after each (CCTL.IVALL).
struct ContendedMemory {
  template <typename T>
  using Atomic = ::cuda::atomic_ref<T, ::cuda::thread_scope_device>;

  SOK_DEVICE DigestWords Digests(const Bucket* bucket) const {
    uint32_t words[kBucketSlots / 4];
#ifdef __CUDA_ARCH__
    // Relaxed reads of four words in one access, which atomic_ref does not offer. The words have
    // the size of the swaps, since PTX guarantees nothing for accesses of different sizes to one
    // place. `__ldcg` is only a hint, and the compiler may keep its value in a register over a
    // loop.
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(__cvta_generic_to_global(bucket->digests))
                 : "memory");
#else
    for (int i = 0; i < kBucketSlots / 4; ++i) {
      words[i] = Atomic<uint32_t>(const_cast<Bucket*>(bucket)->digests[i])
                     .load(::cuda::memory_order_relaxed);
    }
#endif
    return {uint64_t{words[1]} << 32 | words[0], uint64_t{words[3]} << 32 | words[2]};
  }
  SOK_DEVICE uint32_t Row(const Bucket* bucket, int slot) const {
    return Atomic<uint32_t>(const_cast<Bucket*>(bucket)->rows[slot])
        .load(::cuda::memory_order_relaxed);
  }
  SOK_DEVICE uint64_t Key(const Bucket* bucket, int slot) const {
    return Atomic<uint64_t>(const_cast<Bucket*>(bucket)->keys[slot])
        .load(::cuda::memory_order_relaxed);
  }
  SOK_DEVICE uint64_t PublishedKey(const Bucket* bucket, int slot) const {
    // The row is not 0. Without the question ptxas would delete the load, and its order with it.
    const uint32_t row = Atomic<uint32_t>(const_cast<Bucket*>(bucket)->rows[slot])
                             .load(::cuda::memory_order_acquire);
    return row == 0 ? 0 : Key(bucket, slot);
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

#endif  // SOK_CORE_CUDA_INDEX_BUCKET_MEMORY_CUH_
