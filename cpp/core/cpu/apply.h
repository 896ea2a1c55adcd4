// ApplyGradients: one optimizer step on the rows of a batch.   (interface)
#ifndef SOK_CORE_CPU_APPLY_H_
#define SOK_CORE_CPU_APPLY_H_

#include <cstdint>

#include "cpp/core/cpu/table.h"
#include "cpp/core/optimizer.h"
#include "cpp/core/parallel.h"

namespace sok {

// Attaches the rule's slot variables on first use; a different rule or other fixed options on a
// table that has one throws std::invalid_argument naming both. Equal keys are summed first, in
// order. Missing keys are inserted. `step` counts from 1 (Adam's bias correction).
// An empty batch still counts as a step (dense meaning: every row's moments decay).
void ApplyGradients(Executor& ex, CpuTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys,  // [num_keys]
                    const float* grads,                                       // [num_keys, dim]
                    int64_t num_keys);

// Sums the gradients of equal keys in order of position. Returns the number of unique keys.
// unique_keys [num_keys] and unique_grads [num_keys, dim] are filled up to that number.
int64_t MergeGradients(Executor& ex, const uint64_t* keys, const float* grads, int64_t num_keys,
                       int64_t dim, uint64_t* unique_keys, float* unique_grads);

}  // namespace sok

#endif  // SOK_CORE_CPU_APPLY_H_
