#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/combine.h"
#include "cpp/core/cuda/launch.cuh"
#include "cpp/core/cuda/primitives.h"
#include "cpp/core/cuda/rows.cuh"

namespace sok {
namespace cuda {
namespace {

constexpr int kAhead = 4;      // rows asked for before the first is added
constexpr int kTileAhead = 8;  // the same in a tile, which has fewer threads to hide the way there

// ---- forward ----

// Rows [num, dim] one behind the other; T is float or const float.
template <typename T>
struct DenseRows {
  T* rows;
  int64_t dim;
  SOK_DEVICE T* operator()(int64_t u) const { return rows + u * dim; }
};

template <typename T>
struct ScatteredRows {
  T* words;
  const int64_t* offsets;  // of each row's first word
  SOK_DEVICE T* operator()(int64_t u) const { return words + offsets[u]; }
};

struct TableRows {
  TableRef table;
  const uint32_t* row_numbers;  // [num_unique]
  SOK_DEVICE const float* operator()(int64_t u) const { return table.Row(row_numbers[u]); }
};

template <int kWidth, typename Rows>
__global__ void __launch_bounds__(kThreads)
    CombineKernel(Samples samples, Rows rows, int64_t num_samples, Pieces<kWidth> pieces,
                  float* out) {
  const int64_t thread = GlobalThread();
  const int64_t s = pieces.LongRowOf(thread);
  const int64_t column = thread - s * pieces.per_row;
  if (s >= num_samples) return;
  const bool none = samples.combiner == Combiner::kNone;
  const int64_t begin = none ? s : samples.row_splits[s];
  const int64_t end = none ? s + 1 : samples.row_splits[s + 1];
  Piece<kWidth>* const result = reinterpret_cast<Piece<kWidth>*>(out) + thread;
  if (end - begin == 1 && samples.weights == nullptr) {
    *result = LoadPiece<kWidth>(rows(samples.inverse[begin]), column);
    return;
  }
  Piece<kWidth> sum = {};
  const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
  if (divisor == 0.0f) {
    *result = sum;
    return;
  }
  for (int64_t k = begin; k < end; k += kAhead) {
    Piece<kWidth> values[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (k + u < end) values[u] = LoadPiece<kWidth>(rows(samples.inverse[k + u]), column);
    }
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (k + u >= end) break;
      const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k + u];
      for (int i = 0; i < kWidth; ++i) sum.x[i] += weight * values[u].x[i];
    }
  }
  for (int i = 0; i < kWidth; ++i) sum.x[i] /= divisor;
  *result = sum;
}

int64_t NumSamples(const Samples& samples) {
  return samples.combiner == Combiner::kNone ? samples.num_keys : samples.batch;
}

// ---- backward ----

// The share that position k takes of the gradient of its sample. Null pointers: sample k, share 1.
struct Shares {
  const int32_t* sample;  // [num_keys]
  const float* factor;    // [num_keys]
};

__global__ void __launch_bounds__(kThreads)
    SharesKernel(Samples samples, int64_t num_samples, int32_t* sample, float* factor) {
  const int64_t s = GlobalThread();
  if (s >= num_samples) return;
  const bool none = samples.combiner == Combiner::kNone;
  const int64_t begin = none ? s : samples.row_splits[s];
  const int64_t end = none ? s + 1 : samples.row_splits[s + 1];
  const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
  for (int64_t k = begin; k < end; ++k) {
    sample[k] = static_cast<int32_t>(s);
    const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k];
    factor[k] = divisor == 0.0f ? 0.0f : weight / divisor;
  }
}

__global__ void __launch_bounds__(kThreads) NumberKernel(int64_t num_keys, uint32_t* positions) {
  const int64_t i = GlobalThread();
  if (i < num_keys) positions[i] = static_cast<uint32_t>(i);
}

struct SortedPositions {
  const uint32_t* rows;       // [num_keys], ascending
  const uint32_t* positions;  // [num_keys]
  int64_t num_keys;
  int64_t tile;      // positions in a tile
  bool skips_zeros;  // a share of 0 passes nothing, not even an infinite gradient
};

// Piece `column` of the partial sum that tile t leaves for its first (0) or last (1) row.
template <int kWidth>
SOK_DEVICE Piece<kWidth>* Partial(float* partials, int64_t per_row, int64_t t, int which,
                                  int64_t column) {
  return reinterpret_cast<Piece<kWidth>*>(partials) + (2 * t + which) * per_row + column;
}

// Piece `column` of a row in `Rows`.
template <int kWidth, typename Rows>
SOK_DEVICE Piece<kWidth>* PieceIn(const Rows& rows, uint32_t row, int64_t column) {
  return reinterpret_cast<Piece<kWidth>*>(rows(row)) + column;
}

template <int kWidth, typename Grads, typename Rows>
__global__ void __launch_bounds__(kThreads)
    SumTilesKernel(SortedPositions sorted, Shares shares, Grads grads, Pieces<kWidth> pieces,
                   Rows out, float* partials) {
  const int64_t thread = GlobalThread();
  const int64_t per_row = pieces.per_row;
  const int64_t t = pieces.LongRowOf(thread);
  const int64_t column = thread - t * per_row;
  const int64_t begin = t * sorted.tile;
  if (begin >= sorted.num_keys) return;
  const int64_t end = begin + sorted.tile < sorted.num_keys ? begin + sorted.tile : sorted.num_keys;
  uint32_t row = sorted.rows[begin];
  Piece<kWidth>* target = PieceIn<kWidth>(out, row, column);
  if (begin > 0 && sorted.rows[begin - 1] == row) {  // it began in an earlier tile
    target = Partial<kWidth>(partials, per_row, t, 0, column);
  }
  Piece<kWidth> sum = {};
  for (int64_t j = begin; j < end; j += kTileAhead) {
    Piece<kWidth> values[kTileAhead];
    float factors[kTileAhead];
#pragma unroll
    for (int u = 0; u < kTileAhead; ++u) {
      if (j + u >= end) continue;
      const uint32_t k = sorted.positions[j + u];
      const int64_t sample = shares.sample == nullptr ? int64_t{k} : int64_t{shares.sample[k]};
      factors[u] = shares.factor == nullptr ? 1.0f : shares.factor[k];
      values[u] = LoadPiece<kWidth>(grads(sample), column);
    }
#pragma unroll
    for (int u = 0; u < kTileAhead; ++u) {
      if (j + u >= end) continue;
      const uint32_t next = sorted.rows[j + u];
      if (next != row) {
        *target = sum;
        row = next;
        target = PieceIn<kWidth>(out, row, column);
        sum = Piece<kWidth>{};
      }
      if (factors[u] == 0.0f && sorted.skips_zeros) continue;
      for (int i = 0; i < kWidth; ++i) sum.x[i] += factors[u] * values[u].x[i];
    }
  }
  const bool goes_on = end < sorted.num_keys && sorted.rows[end] == row;
  const bool began_before = begin > 0 && sorted.rows[begin - 1] == row;
  if (goes_on && !began_before) target = Partial<kWidth>(partials, per_row, t, 1, column);
  *target = sum;
}

// For each tile whose last row begins there and goes on: its partial sums, in order of tile.
template <int kWidth, typename Rows>
__global__ void __launch_bounds__(kThreads)
    JoinTilesKernel(SortedPositions sorted, Pieces<kWidth> pieces, float* partials, Rows out) {
  const int64_t thread = GlobalThread();
  const int64_t per_row = pieces.per_row;
  const int64_t t = pieces.LongRowOf(thread);
  const int64_t column = thread - t * per_row;
  const int64_t begin = t * sorted.tile;
  const int64_t end = begin + sorted.tile;
  if (end >= sorted.num_keys) return;  // nothing follows
  const uint32_t row = sorted.rows[end - 1];
  if (sorted.rows[end] != row) return;
  if (begin > 0 && sorted.rows[begin - 1] == row) return;  // begins in an earlier tile
  int64_t low = end, high = sorted.num_keys;               // first position behind the row
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted.rows[middle] == row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const int64_t last_tile = (low - 1) / sorted.tile;
  Piece<kWidth> sum = *Partial<kWidth>(partials, per_row, t, 1, column);
#pragma unroll 8
  for (int64_t other = t + 1; other <= last_tile; ++other) {
    const Piece<kWidth> part = *Partial<kWidth>(partials, per_row, other, 0, column);
    for (int i = 0; i < kWidth; ++i) sum.x[i] += part.x[i];
  }
  *PieceIn<kWidth>(out, row, column) = sum;
}

// Long enough that few partial sums are left, short enough that there are tiles for all threads of
// a device: a thread takes 16 bytes of a tile's rows. By the shape of the batch alone.
int64_t TileOf(int64_t num_keys, int64_t dim) {
  const int64_t pieces = (dim + 3) / 4;
  int64_t tile = 32;
  while (tile < 256 && num_keys / tile * pieces > int64_t{1} << 17) tile *= 2;
  return tile;
}

__global__ void __launch_bounds__(kThreads) ScaleKernel(float* values, int64_t count, float scale) {
  const int64_t i = GlobalThread();
  if (i < count) values[i] *= scale;
}

template <int kWidth, typename Rows>
void LaunchCombine(Stream stream, const Samples& samples, const Rows& rows, int64_t dim,
                   float* out) {
  Launch(CombineKernel<kWidth, Rows>, NumSamples(samples) * (dim / kWidth), stream, samples, rows,
         NumSamples(samples), Pieces<kWidth>(dim), out);
}

// Positions by the row that they read, and their shares.
struct Sorted {
  SortedPositions positions;
  Shares shares = {nullptr, nullptr};
  int64_t num_tiles;
};

Sorted SortPositions(Stream stream, Workspace& workspace, const Samples& samples,
                     int64_t num_unique, int64_t dim) {
  const int64_t num_keys = samples.num_keys;
  Sorted sorted;
  const bool none = samples.combiner == Combiner::kNone;
  if (!none || samples.weights != nullptr) {
    int32_t* const sample = workspace.Take<int32_t>(num_keys);
    float* const factor = workspace.Take<float>(num_keys);
    Launch(SharesKernel, NumSamples(samples), stream, samples, NumSamples(samples), sample, factor);
    sorted.shares = {sample, factor};
  }
  const auto* const rows = reinterpret_cast<const uint32_t*>(samples.inverse);  // none is negative
  uint32_t* const positions = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_rows = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_positions = workspace.Take<uint32_t>(num_keys);
  Launch(NumberKernel, num_keys, stream, num_keys, positions);
  SortPairs(stream, workspace, rows, sorted_rows, positions, sorted_positions, num_keys,
            BitsBelow(num_unique));
  const int64_t tile = TileOf(num_keys, dim);
  sorted.num_tiles = (num_keys + tile - 1) / tile;
  sorted.positions = {sorted_rows, sorted_positions, num_keys, tile,
                      samples.combiner != Combiner::kSum};
  return sorted;
}

template <int kWidth, typename Grads, typename Rows>
void LaunchGradient(Stream stream, Workspace& workspace, const Sorted& sorted, const Grads& grads,
                    int64_t dim, const Rows& out) {
  const Pieces<kWidth> pieces(dim);
  const int64_t num_threads = sorted.num_tiles * pieces.per_row;
  float* const partials = workspace.Take<float>(2 * sorted.num_tiles * dim);
  Launch(SumTilesKernel<kWidth, Grads, Rows>, num_threads, stream, sorted.positions, sorted.shares,
         grads, pieces, out, partials);
  Launch(JoinTilesKernel<kWidth, Rows>, num_threads, stream, sorted.positions, pieces, partials,
         out);
}

void Zero(Stream stream, float* values, int64_t count) {
  Check(cudaMemsetAsync(values, 0, static_cast<size_t>(count) * sizeof(float), stream),
        "cudaMemsetAsync");
}

}  // namespace

void CombineRows(Stream stream, const Samples& samples, const float* rows, int64_t dim,
                 float* out) {
  WithPieceWidth(Aligned16(rows) ? dim : 1, out, [&](auto width) {
    LaunchCombine<decltype(width)::value>(stream, samples, DenseRows<const float>{rows, dim}, dim,
                                          out);
  });
}

void CombineTableRows(Stream stream, const Samples& samples, const TableRef& table,
                      const uint32_t* row_numbers, float* out) {
  WithPieceWidth(table.dim, out, [&](auto width) {
    LaunchCombine<decltype(width)::value>(stream, samples, TableRows{table, row_numbers}, table.dim,
                                          out);
  });
}

void CombineScatteredRows(Stream stream, const Samples& samples, const float* words,
                          const int64_t* offsets, int64_t dim, float* out) {
  LaunchCombine<1>(stream, samples, ScatteredRows<const float>{words, offsets}, dim, out);
}

void CombineGradient(Stream stream, Workspace& workspace, const Samples& samples, const float* grad,
                     int64_t num_unique, int64_t dim, float* out, bool all_occur) {
  if (num_unique == 0) return;
  if (!all_occur) Zero(stream, out, num_unique * dim);
  if (samples.num_keys == 0) return;
  const Workspace::Scope scope(workspace, stream);
  const Sorted sorted = SortPositions(stream, workspace, samples, num_unique, dim);
  WithPieceWidth(Aligned16(grad) ? dim : 1, out, [&](auto width) {
    LaunchGradient<decltype(width)::value>(stream, workspace, sorted,
                                           DenseRows<const float>{grad, dim}, dim,
                                           DenseRows<float>{out, dim});
  });
}

void CombineGradientToScattered(Stream stream, Workspace& workspace, const Samples& samples,
                                const float* grad, int64_t num_unique, int64_t dim,
                                const int64_t* offsets, float* words) {
  if (num_unique == 0 || samples.num_keys == 0) return;
  const Workspace::Scope scope(workspace, stream);
  const Sorted sorted = SortPositions(stream, workspace, samples, num_unique, dim);
  LaunchGradient<1>(stream, workspace, sorted, DenseRows<const float>{grad, dim}, dim,
                    ScatteredRows<float>{words, offsets});
}

void SumScatteredRows(Stream stream, Workspace& workspace, const int32_t* inverse, int64_t num_rows,
                      const float* words, const int64_t* offsets, int64_t num_unique, int64_t dim,
                      float scale, float* out) {
  if (num_unique == 0) return;
  Zero(stream, out, num_unique * dim);
  if (num_rows == 0) return;
  const Workspace::Scope scope(workspace, stream);
  Samples samples;
  samples.inverse = inverse;
  samples.num_keys = num_rows;
  samples.combiner = Combiner::kNone;
  const Sorted sorted = SortPositions(stream, workspace, samples, num_unique, dim);
  LaunchGradient<1>(stream, workspace, sorted, ScatteredRows<const float>{words, offsets}, dim,
                    DenseRows<float>{out, dim});
  if (scale != 1.0f) {
    Launch(ScaleKernel, num_unique * dim, stream, out, num_unique * dim, scale);
  }
}

}  // namespace cuda
}  // namespace sok
