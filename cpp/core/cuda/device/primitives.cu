#include <cuda_runtime.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpp/core/cuda/device/primitives.h"

namespace sok {
namespace cuda {
namespace {

int Checked(int64_t count) {
  if (count < 0 || count > INT32_MAX) {
    throw std::invalid_argument("A batch must have between 0 and 2^31 - 1 elements. Received: " +
                                std::to_string(count));
  }
  return static_cast<int>(count);
}

template <typename In, typename Out>
void Scan(Stream stream, Workspace& workspace, In in, Out* out, int64_t count) {
  const int n = Checked(count);
  if (n == 0) return;
  size_t bytes = 0;
  CudaCheck(cub::DeviceScan::ExclusiveSum(static_cast<void*>(nullptr), bytes, in, out, n, stream),
            "DeviceScan");
  void* const scratch = workspace.Take<char>(static_cast<int64_t>(bytes));
  CudaCheck(cub::DeviceScan::ExclusiveSum(scratch, bytes, in, out, n, stream), "DeviceScan");
}

// fn(at), fn(at + 1), .. as an iterator: a scan computes what it sums.
template <typename Fn>
struct Mapped {
  using iterator_category = std::random_access_iterator_tag;
  using value_type = decltype(std::declval<Fn>()(int64_t{0}));
  using difference_type = int64_t;
  using pointer = const value_type*;
  using reference = value_type;

  Fn fn;
  int64_t at;

  SOK_HD value_type operator*() const { return fn(at); }
  SOK_HD value_type operator[](int64_t i) const { return fn(at + i); }
  SOK_HD Mapped operator+(int64_t i) const { return {fn, at + i}; }
};

struct CountAt {
  const uint32_t* values;
  SOK_HD uint32_t operator()(int64_t i) const { return values[i] + 1; }
};

struct CountOfMaskAt {
  const uint64_t* masks;
  int64_t num_words;
  SOK_HD uint64_t operator()(int64_t i) const {
    return CountOfMask(masks + i * num_words, num_words);
  }
};

template <typename Key>
void Sort(Stream stream, Workspace& workspace, const Key* keys, Key* sorted_keys,
          const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  const int n = Checked(count);
  if (n == 0) return;
  size_t bytes = 0;
  CudaCheck(cub::DeviceRadixSort::SortPairs(static_cast<void*>(nullptr), bytes, keys, sorted_keys,
                                            values, sorted_values, n, 0, num_bits, stream),
            "DeviceRadixSort");
  void* const scratch = workspace.Take<char>(static_cast<int64_t>(bytes));
  CudaCheck(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values,
                                            sorted_values, n, 0, num_bits, stream),
            "DeviceRadixSort");
}

}  // namespace

int BitsBelow(int64_t end) {
  int bits = 1;
  while (bits < 63 && (int64_t{1} << bits) < end) ++bits;
  return bits;
}

void ExclusiveSum(Stream stream, Workspace& workspace, uint32_t* values, int64_t count) {
  Scan(stream, workspace, values, values, count);
}

void SumMasks(Stream stream, Workspace& workspace, const uint64_t* masks, int64_t num_words,
              int64_t num_masks, uint64_t* sums) {
  Scan(stream, workspace, Mapped<CountOfMaskAt>{{masks, num_words}, 0}, sums, num_masks);
}

void SumCounts(Stream stream, Workspace& workspace, const uint32_t* values, uint32_t* sums,
               int64_t count) {
  Scan(stream, workspace, Mapped<CountAt>{{values}, 0}, sums, count);
}

void SortPairs(Stream stream, Workspace& workspace, const uint32_t* keys, uint32_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  Sort(stream, workspace, keys, sorted_keys, values, sorted_values, count, num_bits);
}

void SortPairs(Stream stream, Workspace& workspace, const uint64_t* keys, uint64_t* sorted_keys,
               const uint32_t* values, uint32_t* sorted_values, int64_t count, int num_bits) {
  Sort(stream, workspace, keys, sorted_keys, values, sorted_values, count, num_bits);
}

}  // namespace cuda
}  // namespace sok
