// How the kernels of combine.h find rows: dense, or scattered in a message.
#ifndef SOK_CORE_CUDA_LOOKUP_COMBINE_ROWS_CUH_
#define SOK_CORE_CUDA_LOOKUP_COMBINE_ROWS_CUH_

#include <cstdint>
#include <vector>

#include "cpp/core/combiner.h"
#include "cpp/core/cuda/device/launch.cuh"

namespace sok {
namespace cuda {

// Contiguous rows [num, dim]; T is float or const float.
template <typename T>
struct DenseRows {
  T* rows;
  int64_t dim;
  SOK_DEVICE T* operator()(int64_t u) const { return rows + u * dim; }
};

template <typename T>
struct ScatteredRows {
  T* words;
  const int64_t* offsets;  // of each row's first word
  SOK_DEVICE T* operator()(int64_t u) const { return words + offsets[u]; }
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_COMBINE_ROWS_CUH_
