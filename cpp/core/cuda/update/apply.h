// ApplyGradients on the device: one optimizer step on the rows of a batch.
//
//     keys, grads -> unique -> find_or_insert -> sum duplicates -> update        any keys
//     row numbers, grads ----------------------------------------> update        unique rows
//
// The update is one kernel: it reads a row with its slot rows once, replays the steps that the row
// missed, applies the same rule struct as the CPU (optimizer.h), and writes the row once.
//
// In a table with policies, gradients of keys without a row are dropped and counted.
//
// Invariant: a row occurs once in an update, and equal keys are summed in an order that depends on
// the batch alone (combine.h).
//
// Tables that make a step together share the launches (jobs.cuh).
//
// All async: nothing waits for the device and nothing is allocated in a warm step. But tables
// without a hashtable wait once to check their keys, and FindOrInsertRows (table.h) may wait.
#ifndef SOK_CORE_CUDA_UPDATE_APPLY_H_
#define SOK_CORE_CUDA_UPDATE_APPLY_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/table/table.h"
#include "cpp/core/optimizer.h"

namespace sok {
namespace cuda {

struct TableGradients {
  CudaTable* table;
  const uint64_t* keys;  // [num_keys]
  const float* grads;    // [num_keys, dim]
  int64_t num_keys;
};

// As sok::ApplyGradients for the CPU's tables: same arguments, same exceptions. The same step on
// different tables, in shared launches; if it throws, no table has made the step.
// `keys_are_unique`: the keys of each table are; otherwise equal keys are searched for.
void ApplyGradients(Stream stream, const std::vector<TableGradients>& batches,
                    const OptimizerOptions& options, float learning_rate, int64_t step,
                    bool keys_are_unique = false);

// For a caller that kept the row numbers of its lookup. Row numbers must not repeat, except kNoRow
// in a table with policies.
void ApplyGradientsToRows(Stream stream, CudaTable& table, const OptimizerOptions& options,
                          float learning_rate, int64_t step,
                          const uint32_t* row_numbers,  // [num_rows]
                          const float* grads,           // [num_rows, dim]
                          int64_t num_rows);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_UPDATE_APPLY_H_
