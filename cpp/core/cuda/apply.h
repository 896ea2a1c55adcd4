// ApplyGradients on the device: one optimizer step on the rows of a batch.
//
//     keys, grads -> unique -> find_or_insert -> sum duplicates -> update        any keys
//     row numbers, grads ----------------------------------------> update        unique rows
//
// The update is one kernel: a row with its slot rows is read once, brought up from the steps it
// missed, changed by the same rule structs as on the CPU (optimizer.h), and written once.
//
// In a table with policies, gradients of keys without a row are dropped and counted.
//
// Invariant: a row occurs once in an update, and equal keys are summed in an order that depends on
// the batch alone (combine.h).
//
// All async: nothing waits for the device and nothing is allocated in a warm step.
#ifndef SOK_CORE_CUDA_APPLY_H_
#define SOK_CORE_CUDA_APPLY_H_

#include <cstdint>
#include <memory>

#include "cpp/core/cuda/table.h"
#include "cpp/core/optimizer.h"

namespace sok {
namespace cuda {

// As sok::ApplyGradients for the CPU's table: same arguments, same exceptions.
void ApplyGradients(Stream stream, CudaTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys,  // [num_keys]
                    const float* grads,                                       // [num_keys, dim]
                    int64_t num_keys, bool keys_are_unique = false);

// The same in two parts, for several tables that take a step together: making it finds the rows and
// does all that can fail, Run updates them. What it is made of must live as long, and nothing else
// may be done with the table in between.
class TableStep {
 public:
  TableStep(Stream stream, CudaTable& table, const OptimizerOptions& options, float learning_rate,
            int64_t step, const uint64_t* keys, const float* grads, int64_t num_keys,
            bool keys_are_unique = false);
  void Run();

 private:
  Stream stream_;
  CudaTable* table_;
  const OptimizerOptions& options_;
  float learning_rate_;
  int64_t step_;
  const float* grads_;  // [num_keys, dim]
  int64_t num_keys_;
  std::unique_ptr<Workspace::Scope> scope_;  // what follows is in the table's workspace
  uint32_t* row_numbers_ = nullptr;          // [num_keys]
  int32_t* inverse_ = nullptr;               // [num_keys] into the rows; null: keys are unique
  uint32_t* num_unique_ = nullptr;           // a device scalar; null: num_keys
};

// For a caller that kept the row numbers of its lookup. Row numbers must not repeat, but for kNoRow
// in a table with policies.
// `num_actual`: in device memory, the number of rows if it is less than num_rows; may be null.
void ApplyGradientsToRows(Stream stream, CudaTable& table, const OptimizerOptions& options,
                          float learning_rate, int64_t step,
                          const uint32_t* row_numbers,  // [num_rows]
                          const float* grads,           // [num_rows, dim]
                          int64_t num_rows, const uint32_t* num_actual = nullptr);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_APPLY_H_
