// Whole batches of rows in and out of tables. Everything here is async; lists of batches of several
// tables share their launches (jobs.cuh).
#ifndef SOK_CORE_CUDA_ROWS_ROW_KERNELS_CUH_
#define SOK_CORE_CUDA_ROWS_ROW_KERNELS_CUH_

#include <cstdint>
#include <vector>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/rows/table_ref.h"

namespace sok {
namespace cuda {

// Probes and copies in one kernel; missing keys read their initial row, or `no_permission`.
struct FindBatch {
  TableRef table;
  const uint64_t* keys;
  int64_t num_keys;
  RowPlaces rows;            // [num_keys]
  uint8_t* found = nullptr;  // [num_keys] or null
};
void FindAndCopy(Stream stream, const std::vector<FindBatch>& batches);

// rows[i] = up-to-date row of row_numbers[i]; kNoRow only if the table filters keys.
struct CopyBatch {
  TableRef table;
  const uint32_t* row_numbers;
  Count num_rows;
  RowPlaces rows;  // [num_rows]
};
void CopyRows(Stream stream, const std::vector<CopyBatch>& batches);

// Brings rows up to date: those at positions with take[i] != 0 (null: all), whose row numbers must
// not repeat; or, with null row_numbers, rows 0 .. num_rows - 1.
void CatchUpRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
                 const uint8_t* take, Count num_rows);

// Writes the first `width` floats of rows: those at position i with take[i] != 0 (null: all).
// Row numbers that are taken must not repeat. `rows` [num_rows, width]
void WriteRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
               const uint8_t* take, int64_t num_rows, int64_t width, const float* rows);

// Copies whole rows with slot rows, not brought up to date. `rows` [num_rows, row_floats]
void CopyWholeRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
                   int64_t num_rows, float* rows);

// Copies rows 0 .. num_rows - 1 to another arena. from_column[c] is the old column that column c of
// a new row comes from, or kInitialColumn for slot_initial, or KeptUnlessUnknown(column) for the
// old column unless it is NaN, a slot that waits for its initial value.
inline constexpr int32_t kInitialColumn = -1;
SOK_HD constexpr int32_t KeptUnlessUnknown(int32_t column) {
  return -2 - column;
}  // its own inverse
void MoveRows(Stream stream, const TableRef& from, const TableRef& to, const int32_t* from_column,
              Count num_rows);

// chunks[first + i] = base + i * chunk_floats.
void SetChunks(Stream stream, float** chunks, int64_t first, int64_t num_chunks, float* base,
               int64_t chunk_floats);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_ROW_KERNELS_CUH_
