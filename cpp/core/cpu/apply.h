// ApplyGradients: one optimizer step on the rows of a batch.
//
//     keys, grads -> find_or_insert -> row numbers -> for each row: [catch up] -> update
//
// Everything happens under the table's exclusive lock. Rows are independent, so threads take
// ranges of the batch; each row and its slot rows are prefetched completely, some rows ahead. Steps
// that a row missed are replayed first (adam_replay.h).
//
// Several tables make one step together (group.h): all find their rows, which may fail; only then is
// any row updated. So all tables make the step or none does.
//
// Usually the keys are those of the table's last lookup, and it still knows their row numbers
// (CpuTable::RecallRows).
//
// Invariant: each row is updated once. Equal keys are found by marking row numbers in a bitmap
// (cheaper than sorting keys, and most callers send unique ones) and are merged in order of
// position, so the result does not depend on the number of threads.
#ifndef SOK_CORE_CPU_APPLY_H_
#define SOK_CORE_CPU_APPLY_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/optimizer.h"
#include "cpp/core/parallel.h"

namespace sok {

// Attaches the rule's slot variables at the first step; a later step with another rule or other
// options throws std::invalid_argument naming both. Gradients of equal keys are summed first, in
// order. Missing keys are inserted; in a table with policies, where only lookups give rows, their
// gradients are dropped. `step` counts from 1 (Adam's bias correction).
// An empty batch is a step too (dense rules: every row's moments decay).
// `keys_are_unique`: skips the search for equal keys; if that is wrong, the rows of equal keys are
// undefined.
// Throws std::length_error if FindOrInsertRows does; then no step was made.
void ApplyGradients(Executor& ex, CpuTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys,  // [num_keys]
                    const float* grads,                                       // [num_keys, dim]
                    int64_t num_keys, bool keys_are_unique = false);

// One table's batch in a step of several.
struct TableGradients {
  CpuTable* table = nullptr;
  const uint64_t* keys = nullptr;  // [num_keys]
  const float* grads = nullptr;    // [num_keys, dim]
  int64_t num_keys = 0;
};

// The same step on several tables, each named once (std::invalid_argument otherwise). If it throws,
// no table has made the step; missing keys may have been inserted, with their initial rows.
void ApplyGradients(Executor& ex, const std::vector<TableGradients>& batches,
                    const OptimizerOptions& options, float learning_rate, int64_t step,
                    bool keys_are_unique = false);

// Sums the gradients of equal keys in order of position. Returns the number of unique keys.
// unique_keys [num_keys] and unique_grads [num_keys, dim] are filled up to that number.
// The order of the unique keys is that of Route for one owner.
int64_t MergeGradients(Executor& ex, const uint64_t* keys, const float* grads, int64_t num_keys,
                       int64_t dim, uint64_t* unique_keys, float* unique_grads);

}  // namespace sok

#endif  // SOK_CORE_CPU_APPLY_H_
