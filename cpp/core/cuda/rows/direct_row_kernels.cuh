// Kernels of a table without a hashtable (direct_rows.h). All its rows are in the arena from the
// start. Keys become row numbers, and the kernels for rows by number do the rest.
#ifndef SOK_CORE_CUDA_ROWS_DIRECT_ROW_KERNELS_CUH_
#define SOK_CORE_CUDA_ROWS_DIRECT_ROW_KERNELS_CUH_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/rows/table_ref.h"
#include "cpp/core/direct_rows.h"

namespace sok {
namespace cuda {

inline constexpr uint64_t kNoPosition = ~uint64_t{0};

// Async. rows[i] = row number of keys[i], or kNoRow if the table does not have the key.
// first_refused [number of batches], in device memory: the first such position, or kNoPosition.
struct RowNumberBatch {
  DirectRows direct;
  const uint64_t* keys;
  Count num_keys;
  uint32_t* rows;
};
void ComputeRowNumbers(Stream stream, const std::vector<RowNumberBatch>& batches,
                       uint64_t* first_refused);

// Async. Gives all rows their initial embedding and slot rows.
void WriteInitialRows(Stream stream, const TableRef& table, const DirectRows& direct);

// Async. rows[i] = first + i.
void ListRowNumbers(Stream stream, int64_t first, int64_t num_rows, uint32_t* rows);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_DIRECT_ROW_KERNELS_CUH_
