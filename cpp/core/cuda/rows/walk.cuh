// Rows whose missed steps are replayed one at a time: ReplayKind::kAdamSteps, see adam_replay.h.
// Dense Adam with beta_2 below 0.99 needs it, and 0.98 and 0.95 are what transformers are trained
// with. Without it such a model would train with its tables in host memory only.
//
// In a kernel of its own, before an update and after a copy. Inside those kernels the replay took
// 10 to 20 more registers, so all other tables would have run with fewer threads at once.
//
//     update   row -> replay, in place -> the rule, for a row that is up to date
//     read     row -> copied as it is -> replayed row over the copy
//
// The same arithmetic as on the CPU (adam_series.h), one thread per element.
#ifndef SOK_CORE_CUDA_ROWS_WALK_CUH_
#define SOK_CORE_CUDA_ROWS_WALK_CUH_

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/rows/table_ref.h"

namespace sok {
namespace cuda {

// Rows by key or by number. A key or number without a row is skipped.
struct WalkedRows {
  Count num_rows;
  const uint64_t* keys = nullptr;         // [num_rows]; null: by number
  const uint32_t* row_numbers = nullptr;  // [num_rows]; null, without keys: 0, 1, 2, ...
  const uint8_t* take = nullptr;          // [num_rows], 0: skip; null: all
};

inline bool IsWalked(const TableRef& table) {
  return table.history.kind == ReplayKind::kAdamSteps && table.history.now > 0;
}

// Both async; they need IsWalked(table).
// Writes the rows that owe steps, brought up to date, over `out` [num_rows].
void Walk(Stream stream, const TableRef& table, const WalkedRows& rows, const Places& out);
// Brings them up in place, with their slots. No row may occur twice.
void WalkInPlace(Stream stream, const TableRef& table, const WalkedRows& rows);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_WALK_CUH_
