// Combine on the device: rows of one sample reduced to one, its gradient, and sums of duplicates.
//
// Forward: a thread takes one piece of one sample's row and visits the sample's keys in order, so
// sums run in order of position and have the CPU's bits.
//
// Backward: positions are sorted by the row they read (stable, so each row's positions stay in
// order) and cut into tiles; a thread takes one piece of all rows of a tile. A row within one tile
// is summed in order of position, with the CPU's bits. A row that spans tiles leaves a partial sum
// in each, and these are added in order of tile: first those of 64 tiles at a time, then the sums.
// So a key that makes up half of a million positions takes some 400 successive additions. Still:
//
// Invariant: the order of every sum depends on the batch alone, never on how threads run.
//
//     sorted    0 0 1 1 | 1 1 1 1 | 1 2 3 3 |        tiles of 4
//     row       0: within    1: tail of tile 0, all of tile 1, head of tile 2    2, 3: within
//
// Rows may lie scattered in a message of several ranks (segments.h). They are read and written
// there, with the same order of sums: in pieces of 16 bytes if all rows of a table begin at a
// multiple of that (`aligned`: offsets are multiples of 4), otherwise by word.
//
// Batches of many tables, of any widths, share their launches and one sort.
//
// All async. `inverse` and `row_splits` are not checked.
#ifndef SOK_CORE_CUDA_LOOKUP_COMBINE_H_
#define SOK_CORE_CUDA_LOOKUP_COMBINE_H_

#include <cstdint>
#include <vector>

#include "cpp/core/combiner.h"
#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/rows/table_ref.h"

namespace sok {
namespace cuda {

// ---- forward: out[s] = combined rows[inverse[k]] of the keys k of sample s ----
// Pointers are to device memory, those in `samples` too. `out` [batch, dim] or [num_keys, dim].

struct CombineBatch {
  Samples samples;
  const float* rows;  // [num_unique, dim]
  int64_t dim;
  float* out;
};
void CombineRows(Stream stream, const std::vector<CombineBatch>& batches);

// Directly from a table, by row number; kNoRow reads zeros. Only while its rows owe nothing.
struct TableCombineBatch {
  Samples samples;
  TableRef table;
  const uint32_t* row_numbers;  // [num_unique]
  float* out;
};
void CombineRows(Stream stream, const std::vector<TableCombineBatch>& batches);

// From rows where row u begins at words[offsets[u]].
struct ScatteredCombineBatch {
  Samples samples;
  const float* words;
  const int64_t* offsets;  // [num_unique]
  int64_t dim;
  float* out;
  bool aligned = false;
};
void CombineRows(Stream stream, const std::vector<ScatteredCombineBatch>& batches);

// ---- backward: out[u] = sum over positions k with inverse[k] == u of k's share of its sample's
// gradient ----

struct CombineGradientBatch {
  Samples samples;
  const float* grad;  // [batch, dim] or [num_keys, dim]
  int64_t num_unique;
  int64_t dim;
  float* out;  // [num_unique, dim]
};
// Overwrites `out`: rows that occur in `inverse` with their sums, the others with zeros. With
// `all_occur` the others are not written: the caller does not need them.
void CombineGradient(Stream stream, Workspace& workspace,
                     const std::vector<CombineGradientBatch>& batches, bool all_occur = false);

// Into rows that begin at words[offsets[u]]. Only rows that some position reads are written.
struct ScatteredGradientBatch {
  Samples samples;
  const float* grad;  // [batch, dim] or [num_keys, dim]
  int64_t num_unique;
  int64_t dim;
  const int64_t* offsets;  // [num_unique]
  float* words;
  bool aligned = false;
};
void CombineGradient(Stream stream, Workspace& workspace,
                     const std::vector<ScatteredGradientBatch>& batches);

// out[u] = scale * sum of the rows at words[offsets[k]], over the positions k of row u in order.
struct ScatteredSumBatch {
  const uint32_t* rows;       // [num_rows] ascending: the row of each position below
  const uint32_t* positions;  // [num_rows]
  int64_t num_rows;
  uint32_t first_row;  // row 0 of `out`; each that follows occurs, too
  const float* words;
  const int64_t* offsets;  // [num_rows]
  int64_t dim;
  float* out;  // [number of different rows, dim]
  bool aligned = false;
};
void SumScatteredRows(Stream stream, Workspace& workspace,
                      const std::vector<ScatteredSumBatch>& batches, float scale);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_COMBINE_H_
