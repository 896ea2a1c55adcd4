#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/combine_rows.cuh"
#include "cpp/core/cuda/rows/row_access.cuh"

namespace sok {
namespace cuda {
namespace {

constexpr int kAhead = 4;  // rows loaded before the first is added

struct TableRows {
  TableRef table;
  const uint32_t* row_numbers;  // [num_unique]
  SOK_DEVICE const float* operator()(int64_t u) const {
    return row_numbers[u] == kNoRow ? nullptr : table.Row(row_numbers[u]);
  }
};

template <int kWidth, typename Rows>
SOK_DEVICE Piece<kWidth> PieceOf(const Rows& rows, int64_t u, int64_t column) {
  const float* const row = rows(u);
  if constexpr (std::is_same_v<Rows, TableRows>) {
    if (row == nullptr) return {};
  }
  return LoadPiece<kWidth>(row, column);
}

template <int kWidth, typename Rows>
struct CombineJob {
  static constexpr int kMinBlocks = kWidth == 4 ? 4 : 0;

  Samples samples;
  Rows rows;
  int64_t num_samples;
  Pieces<kWidth> pieces;
  float* out;

  int64_t NumThreads() const { return num_samples * pieces.per_row; }
  SOK_DEVICE void Run(int64_t thread) const {
    const int64_t s = pieces.LongRowOf(thread);
    const int64_t column = thread - s * pieces.per_row;
    if (s >= num_samples) return;
    const bool none = samples.combiner == Combiner::kNone;
    const int64_t begin = samples.Begin(s), end = samples.End(s);
    Piece<kWidth>* const result = reinterpret_cast<Piece<kWidth>*>(out) + thread;
    if (end - begin == 1 && samples.weights == nullptr) {
      *result = PieceOf<kWidth>(rows, samples.inverse[begin], column);
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
        if (k + u < end) values[u] = PieceOf<kWidth>(rows, samples.inverse[k + u], column);
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
};

// Wide rows in one launch, narrow ones in another.
template <typename Rows>
struct Combines {
  std::vector<CombineJob<4, Rows>> wide;
  std::vector<CombineJob<1, Rows>> narrow;

  void Add(const Samples& samples, const Rows& rows, int64_t dim, bool is_wide, float* out) {
    if (is_wide) {
      wide.push_back({samples, rows, samples.num_samples(), Pieces<4>(dim), out});
    } else {
      narrow.push_back({samples, rows, samples.num_samples(), Pieces<1>(dim), out});
    }
  }
  void Launch(Stream stream) const {
    LaunchJobs(stream, wide);
    LaunchJobs(stream, narrow);
  }
};

}  // namespace

void CombineRows(Stream stream, const std::vector<CombineBatch>& batches) {
  Combines<DenseRows<const float>> combines;
  for (const CombineBatch& batch : batches) {
    const bool wide = batch.dim % 4 == 0 && Aligned16(batch.rows) && Aligned16(batch.out);
    combines.Add(batch.samples, {batch.rows, batch.dim}, batch.dim, wide, batch.out);
  }
  combines.Launch(stream);
}

void CombineRows(Stream stream, const std::vector<TableCombineBatch>& batches) {
  Combines<TableRows> combines;
  for (const TableCombineBatch& batch : batches) {
    const int64_t dim = batch.table.dim;
    combines.Add(batch.samples, {batch.table, batch.row_numbers}, dim,
                 dim % 4 == 0 && Aligned16(batch.out), batch.out);
  }
  combines.Launch(stream);
}

void CombineRows(Stream stream, const std::vector<ScatteredCombineBatch>& batches) {
  Combines<ScatteredRows<const float>> combines;
  for (const ScatteredCombineBatch& batch : batches) {
    const bool wide =
        batch.aligned && batch.dim % 4 == 0 && Aligned16(batch.words) && Aligned16(batch.out);
    combines.Add(batch.samples, {batch.words, batch.offsets}, batch.dim, wide, batch.out);
  }
  combines.Launch(stream);
}

}  // namespace cuda
}  // namespace sok
