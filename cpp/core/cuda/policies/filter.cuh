// How often a filter has seen a key, read and counted by kernels. The counts are those of
// cpu/admission.h.
//
// A lookup reads all counts before it counts anything (two kernels), so counts do not depend on the
// order of threads. Counting adds 1 with saturation, in any order.
#ifndef SOK_CORE_CUDA_POLICIES_FILTER_CUH_
#define SOK_CORE_CUDA_POLICIES_FILTER_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/index/bucket_memory.cuh"
#include "cpp/core/cuda/index/probe.h"
#include "cpp/core/cuda/policies/records.h"

namespace sok {
namespace cuda {

SOK_DEVICE uint64_t LoadCounter(const FilterRef& filter, int64_t place) {
  switch (filter.counter_bits) {
    case 8:
      return static_cast<const uint8_t*>(filter.counters)[place];
    case 16:
      return static_cast<const uint16_t*>(filter.counters)[place];
    case 32:
      return static_cast<const uint32_t*>(filter.counters)[place];
    default:
      return static_cast<const uint64_t*>(filter.counters)[place];
  }
}

// Adds 1 unless the counter is at its largest value. Small counters are changed within the 32-bit
// word that holds them.
SOK_DEVICE void CountUp(const FilterRef& filter, int64_t place) {
  if (filter.counter_bits == 64) {
    auto* const counter = static_cast<unsigned long long*>(filter.counters) + place;
    for (unsigned long long seen = __ldcg(counter); seen != ~0ull;) {
      const unsigned long long before = atomicCAS(counter, seen, seen + 1);
      if (before == seen) return;
      seen = before;
    }
    return;
  }
  const int per_word = 32 / filter.counter_bits;
  const int shift = static_cast<int>(place % per_word) * filter.counter_bits;
  const uint32_t most = 0xFFFFFFFFu >> (32 - filter.counter_bits);
  uint32_t* const word = static_cast<uint32_t*>(filter.counters) + place / per_word;
  for (uint32_t seen = __ldcg(word); (seen >> shift & most) != most;) {
    const uint32_t before = atomicCAS(word, seen, seen + (1u << shift));
    if (before == seen) return;
    seen = before;
  }
}

// The least of a key's counters, at most 2^63 - 1.
SOK_DEVICE int64_t LeastCounter(const FilterRef& filter, uint64_t hash) {
  const BloomPlaces places(filter.bloom, hash);
  uint64_t least = INT64_MAX;
  for (int i = 0; i < filter.bloom.num_hashes; ++i) {
    const uint64_t count = LoadCounter(filter, places[i]);
    least = count < least ? count : least;
  }
  return static_cast<int64_t>(least);
}

SOK_DEVICE WaitingRow* WaitingRowAt(const TableRef& waiting, uint32_t row) {
  return reinterpret_cast<WaitingRow*>(waiting.Row(row));
}

// What the filter knows of a key; zeros if nothing.
SOK_DEVICE WaitingRow FindWaiting(const FilterRef& filter, uint64_t hash, uint64_t key) {
  if (filter.is_bloom) return {LeastCounter(filter, hash), 0};
  if (!filter.is_exact) return {0, 0};
  const uint32_t row = FindRow(ReadOnlyMemory(), filter.waiting.index, hash, key);
  if (row == kNoRow) return {0, 0};
  return *WaitingRowAt(filter.waiting, row);
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_FILTER_CUH_
