// A feature's part of a batch, for the checks of core/cuda.
#ifndef SOK_TF_CUDA_BATCH_H_
#define SOK_TF_CUDA_BATCH_H_

#include <vector>

#include "cpp/core/cuda/lookup/check_batch.h"
#include "cpp/tf/batch_watch.h"
#include "cpp/tf/common.h"
#include "cpp/tf/samples.h"

namespace sok {

// Call it after FeatureAttrs::CheckShapes. The tensors must outlive the result.
inline cuda::BatchInput BatchInputOf(const FeatureAttrs& features, int i, const FeatureInputs& in) {
  cuda::BatchInput input;
  input.table = features.table_name(i);
  input.limits = features.limits(i);
  input.keys = Keys(in.keys[i]);
  input.num_keys = in.keys[i].NumElements();
  if (features.has_samples(i)) {
    input.row_splits = in.row_splits[i].flat<int64_t>().data();
    input.batch = in.row_splits[i].NumElements() - 1;
  }
  return input;
}

// Keeps the keys of checked batches while they are observed, and then waits for copies of them.
inline void ObserveBatches(cuda::Stream stream, const std::vector<cuda::BatchInput>& inputs) {
  if (!ObservesBatches()) return;
  for (const cuda::BatchInput& input : inputs) {
    std::vector<uint64_t> keys(input.num_keys);
    cuda::CopyToHost(stream, keys.data(), input.keys, keys.size() * sizeof(uint64_t));
    ObserveBatch(input.table, keys.data(), input.num_keys);
  }
}

}  // namespace sok

#endif  // SOK_TF_CUDA_BATCH_H_
