// A feature's part of a batch, for the checks of core/cuda.
#ifndef SOK_TF_CUDA_BATCH_H_
#define SOK_TF_CUDA_BATCH_H_

#include "cpp/core/cuda/lookup/check_batch.h"
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

}  // namespace sok

#endif  // SOK_TF_CUDA_BATCH_H_
