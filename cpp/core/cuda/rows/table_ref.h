// TableRef: what kernels need of a table, by value. CudaTable (table.h) owns the memory.
//
//     index     buckets of 16 digests | 16 keys | 16 row numbers          bucket.h
//     chunks    [chunk 0] [chunk 1] ...      row r: chunk r >> chunk_shift, place r & chunk_mask
//     row       | embedding, dim | slot rows of the optimizer | padding to 16 bytes |
//     counters  row numbers given out, free ones, slots in use; only the device knows them
//
// Growing adds chunks and appends their addresses, so a row never moves.
// Compiled by host compilers too: includes nothing of CUDA.
#ifndef SOK_CORE_CUDA_ROWS_TABLE_REF_H_
#define SOK_CORE_CUDA_ROWS_TABLE_REF_H_

#include <cstdint>

#include "cpp/core/adam_replay.h"
#include "cpp/core/cuda/index/bucket.h"
#include "cpp/core/initializer.h"

namespace sok {
namespace cuda {

struct Counters {
  uint32_t next_row;      // row numbers below have been given out at some time
  uint32_t num_free;      // of them, those in free_rows
  uint32_t used;          // slots of the index that are not empty: present or erased
  uint32_t size;          // keys present
  uint32_t num_inserted;  // keys that the running call has inserted so far
  uint32_t erased;        // keys that the last Erase removed
};

// The steps that rows have missed: StepHistory (adam_replay.h) in device memory.
// Steps count from `base`, the last one at which no row owed anything.
struct HistoryRef {
  ReplayKind kind = ReplayKind::kNothing;
  bool decays = false;    // weight decay
  int16_t num_terms = 0;  // few: the smaller a TableRef, the more jobs a launch holds
  uint32_t base = 0;
  uint32_t now = 0;  // steps since base; 0: nothing is owed
  uint32_t window = 0;
  float epsilon = 0.0f;
  float momentum_scale = 1.0f;          // kMomentum: sign and nesterov
  float initial_decay = 1.0f;           // P(0, now), of a row that was never inserted
  const double* terms = nullptr;        // [now + 1, num_terms] F_i(s, now), frozen after `window`
  const double* log_decay = nullptr;    // [now + 1] log P(0, s)
  const float* beta_1_power = nullptr;  // [now + 1]
  const float* beta_2_power = nullptr;  // [now + 1]
  // kAdamSteps: the constants that replay step s, and the betas as written.
  const double* alpha = nullptr;  // [now + 1]
  const double* decay = nullptr;  // [now + 1]; null without weight decay
  double beta_1 = 0.0;
  double beta_2 = 0.0;
};

// Where the rows of a batch go: row i to begin + i * dim, or scattered, to begin + offsets[i].
struct Places {
  float* begin = nullptr;
  const int64_t* offsets = nullptr;

  SOK_HD float* Row(int64_t i, int64_t dim) const {
    return begin + (offsets == nullptr ? i * dim : offsets[i]);
  }
};

// The same, and what the host must know of them.
struct RowPlaces : Places {
  bool aligned = true;  // all offsets are multiples of 4

  RowPlaces(float* rows) { begin = rows; }  // NOLINT: dense rows
  RowPlaces(float* message, const int64_t* row_offsets, bool are_aligned) : aligned(are_aligned) {
    begin = message;
    offsets = row_offsets;
  }
};

struct TableRef {
  IndexRef index;
  float* const* chunks = nullptr;
  int chunk_shift = 0;
  uint32_t chunk_mask = 0;
  int64_t stride = 0;  // floats from a row to the next, a multiple of 4
  int64_t dim = 0;
  int64_t row_floats = 0;               // embedding and slot rows
  const float* slot_initial = nullptr;  // [row_floats - dim]
  int64_t last_step_offset = 0;         // floats from the row; if rows owe steps
  Initializer initializer;
  float initial_scale = 1.0f;  // weight decay of steps that the history has forgotten
  HistoryRef history;
  bool filters = false;  // keys without a row read `no_permission`
  float no_permission = 0.0f;
  Counters* counters = nullptr;
  uint32_t* free_rows = nullptr;  // [num_free] as a stack

  SOK_HD float* Row(uint32_t row) const {
    return chunks[row >> chunk_shift] + static_cast<int64_t>(row & chunk_mask) * stride;
  }
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_TABLE_REF_H_
