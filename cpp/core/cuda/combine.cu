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

struct DenseRows {
  const float* rows;  // [num_unique, dim]
  int64_t dim;
  SOK_DEVICE const float* operator()(int32_t u) const { return rows + int64_t{u} * dim; }
};

struct TableRows {
  TableRef table;
  const uint32_t* row_numbers;  // [num_unique]
  SOK_DEVICE const float* operator()(int32_t u) const { return table.Row(row_numbers[u]); }
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

template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    SumTilesKernel(SortedPositions sorted, Shares shares, const float* grad, Pieces<kWidth> pieces,
                   float* out, float* partials) {
  const int64_t thread = GlobalThread();
  const int64_t per_row = pieces.per_row;
  const int64_t t = pieces.LongRowOf(thread);
  const int64_t column = thread - t * per_row;
  const int64_t begin = t * sorted.tile;
  if (begin >= sorted.num_keys) return;
  const int64_t end = begin + sorted.tile < sorted.num_keys ? begin + sorted.tile : sorted.num_keys;
  const Piece<kWidth>* const grads = reinterpret_cast<const Piece<kWidth>*>(grad);
  Piece<kWidth>* const rows_out = reinterpret_cast<Piece<kWidth>*>(out) + column;
  uint32_t row = sorted.rows[begin];
  Piece<kWidth>* target = rows_out + row * per_row;
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
      values[u] = grads[sample * per_row + column];
    }
#pragma unroll
    for (int u = 0; u < kTileAhead; ++u) {
      if (j + u >= end) continue;
      const uint32_t next = sorted.rows[j + u];
      if (next != row) {
        *target = sum;
        row = next;
        target = rows_out + row * per_row;
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
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    JoinTilesKernel(SortedPositions sorted, Pieces<kWidth> pieces, float* partials, float* out) {
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
  reinterpret_cast<Piece<kWidth>*>(out)[int64_t{row} * per_row + column] = sum;
}

// Long enough that few partial sums are left, short enough that there are tiles for all threads of
// a device: a thread takes 16 bytes of a tile's rows. By the shape of the batch alone.
int64_t TileOf(int64_t num_keys, int64_t dim) {
  const int64_t pieces = (dim + 3) / 4;
  int64_t tile = 32;
  while (tile < 256 && num_keys / tile * pieces > int64_t{1} << 17) tile *= 2;
  return tile;
}

}  // namespace

void CombineRows(Stream stream, const Samples& samples, const float* rows, int64_t dim,
                 float* out) {
  const bool aligned = Aligned16(rows);
  WithPieceWidth(aligned ? dim : 1, out, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const int64_t per_row = dim / kWidth;
    Launch(CombineKernel<kWidth, DenseRows>, NumSamples(samples) * per_row, stream, samples,
           DenseRows{rows, dim}, NumSamples(samples), Pieces<kWidth>(dim), out);
  });
}

void CombineTableRows(Stream stream, const Samples& samples, const TableRef& table,
                      const uint32_t* row_numbers, float* out) {
  WithPieceWidth(table.dim, out, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const int64_t per_row = table.dim / kWidth;
    Launch(CombineKernel<kWidth, TableRows>, NumSamples(samples) * per_row, stream, samples,
           TableRows{table, row_numbers}, NumSamples(samples), Pieces<kWidth>(table.dim), out);
  });
}

void CombineGradient(Stream stream, Workspace& workspace, const Samples& samples, const float* grad,
                     int64_t num_unique, int64_t dim, float* out, bool all_occur) {
  const int64_t num_keys = samples.num_keys;
  if (num_unique == 0) return;
  if (!all_occur) {
    Check(cudaMemsetAsync(out, 0, static_cast<size_t>(num_unique * dim) * sizeof(float), stream),
          "cudaMemsetAsync");
  }
  if (num_keys == 0) return;
  const Workspace::Scope scope(workspace, stream);
  Shares shares = {nullptr, nullptr};
  const bool none = samples.combiner == Combiner::kNone;
  if (!none || samples.weights != nullptr) {
    int32_t* const sample = workspace.Take<int32_t>(num_keys);
    float* const factor = workspace.Take<float>(num_keys);
    Launch(SharesKernel, NumSamples(samples), stream, samples, NumSamples(samples), sample, factor);
    shares = {sample, factor};
  }
  const auto* const rows = reinterpret_cast<const uint32_t*>(samples.inverse);  // none is negative
  uint32_t* const positions = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_rows = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_positions = workspace.Take<uint32_t>(num_keys);
  Launch(NumberKernel, num_keys, stream, num_keys, positions);
  SortPairs(stream, workspace, rows, sorted_rows, positions, sorted_positions, num_keys,
            BitsBelow(num_unique));
  const int64_t tile = TileOf(num_keys, dim);
  const int64_t num_tiles = (num_keys + tile - 1) / tile;
  const SortedPositions sorted{sorted_rows, sorted_positions, num_keys, tile,
                               samples.combiner != Combiner::kSum};
  float* const partials = workspace.Take<float>(2 * num_tiles * dim);
  WithPieceWidth(Aligned16(grad) ? dim : 1, out, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const Pieces<kWidth> pieces(dim);
    const int64_t num_threads = num_tiles * pieces.per_row;
    Launch(SumTilesKernel<kWidth>, num_threads, stream, sorted, shares, grad, pieces, out,
           partials);
    Launch(JoinTilesKernel<kWidth>, num_threads, stream, sorted, pieces, partials, out);
  });
}

}  // namespace cuda
}  // namespace sok
