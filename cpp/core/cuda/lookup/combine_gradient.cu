#include <cuda_runtime.h>

#include <type_traits>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/combine_rows.cuh"
#include "cpp/core/cuda/lookup/sorted_positions.cuh"
#include "cpp/core/cuda/rows/row_access.cuh"

namespace sok {
namespace cuda {
namespace {

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

// A thread sums one piece of all rows of a tile.
template <int kWidth, typename Grads, typename Rows>
struct SumTilesJob {
  // Rows loaded before the first is added. Fewer if pieces are narrow, since there are four times
  // as many threads, or if rows are scattered, since their offsets take registers.
  static constexpr bool kScattered = !std::is_same_v<Rows, DenseRows<float>>;
  static constexpr int kAhead = kWidth == 1 || kScattered ? 4 : 8;
  static constexpr int kMinBlocks = kWidth == 1 ? 4 : 0;
  // Sums of scattered rows are scaled; the others have no register for it.
  static constexpr bool kScales = std::is_same_v<Grads, ScatteredRows<const float>>;

  SortedPositions sorted;
  Shares shares;
  Grads grads;
  Pieces<kWidth> pieces;
  Rows out;
  float* partials;
  float scale;

  int64_t NumThreads() const { return sorted.num_tiles() * pieces.per_row; }
  SOK_DEVICE void Run(int64_t thread) const {
    const int64_t per_row = pieces.per_row;
    const int64_t t = pieces.LongRowOf(thread);
    const int64_t column = thread - t * per_row;
    const int64_t begin = t * sorted.tile;
    if (begin >= sorted.num_keys) return;
    const int64_t end =
        begin + sorted.tile < sorted.num_keys ? begin + sorted.tile : sorted.num_keys;
    uint32_t row = sorted.rows[begin];
    Piece<kWidth>* target = PieceIn<kWidth>(out, row - sorted.first_row, column);
    float factor = scale;                              // of what goes to the target
    if (begin > 0 && sorted.rows[begin - 1] == row) {  // it began in an earlier tile
      target = Partial<kWidth>(partials, per_row, t, 0, column);
      factor = 1.0f;
    }
    const auto store = [&](const Piece<kWidth>& sum) {
      Piece<kWidth> scaled = sum;
      if constexpr (kScales) {
        for (int i = 0; i < kWidth; ++i) scaled.x[i] *= factor;
      }
      *target = scaled;
    };
    Piece<kWidth> sum = {};
    for (int64_t j = begin; j < end; j += kAhead) {
      Piece<kWidth> values[kAhead];
      float factors[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (j + u >= end) continue;
        const uint32_t k = sorted.positions[j + u];
        const int64_t sample = shares.sample == nullptr ? int64_t{k} : int64_t{shares.sample[k]};
        factors[u] = shares.factor == nullptr ? 1.0f : shares.factor[k];
        values[u] = LoadPiece<kWidth>(grads(sample), column);
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        if (j + u >= end) continue;
        const uint32_t next = sorted.rows[j + u];
        if (next != row) {
          store(sum);
          row = next;
          target = PieceIn<kWidth>(out, row - sorted.first_row, column);
          factor = scale;
          sum = Piece<kWidth>{};
        }
        if (factors[u] == 0.0f && sorted.skips_zeros) continue;
        for (int i = 0; i < kWidth; ++i) sum.x[i] += factors[u] * values[u].x[i];
      }
    }
    const bool goes_on = end < sorted.num_keys && sorted.rows[end] == row;
    const bool began_before = begin > 0 && sorted.rows[begin - 1] == row;
    if (goes_on && !began_before) target = Partial<kWidth>(partials, per_row, t, 1, column);
    if (goes_on) factor = 1.0f;
    store(sum);
  }
};

// First position behind those of `row`, of which `begin` is one.
SOK_DEVICE int64_t EndOfRow(const SortedPositions& sorted, uint32_t row, int64_t begin) {
  int64_t low = begin + 1, high = sorted.num_keys;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted.rows[middle] == row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Partial sums of one row are joined in two levels: those of kGroup tiles at a time, then these. So
// n of them take some 2 * kGroup + n / kGroup successive additions.
constexpr int64_t kGroup = 64;

// `sum` plus the first partial sums of tiles first .. last, in order.
template <int kWidth>
SOK_DEVICE void AddPartials(float* partials, int64_t per_row, int64_t column, int64_t first,
                            int64_t last, int64_t stride, Piece<kWidth>* sum) {
#pragma unroll 8
  for (int64_t t = first; t <= last; t += stride) {
    const Piece<kWidth> part = *Partial<kWidth>(partials, per_row, t, 0, column);
    for (int i = 0; i < kWidth; ++i) sum->x[i] += part.x[i];
  }
}

// For each group whose first row began before it: the row's partial sums in the group, added into
// the first of them. Such a row has one if it goes on in the next tile, too.
template <int kWidth>
struct JoinGroupsJob {
  SortedPositions sorted;
  Pieces<kWidth> pieces;
  float* partials;

  int64_t NumThreads() const { return (sorted.num_tiles() + kGroup - 1) / kGroup * pieces.per_row; }
  SOK_DEVICE void Run(int64_t thread) const {
    const int64_t per_row = pieces.per_row;
    const int64_t group = pieces.LongRowOf(thread);
    const int64_t column = thread - group * per_row;
    const int64_t first = group * kGroup, begin = first * sorted.tile;
    if (begin == 0 || begin >= sorted.num_keys) return;
    const uint32_t row = sorted.rows[begin];
    if (sorted.rows[begin - 1] != row) return;
    const int64_t last_tile = (EndOfRow(sorted, row, begin) - 1) / sorted.tile;
    const int64_t last = last_tile < first + kGroup ? last_tile : first + kGroup - 1;
    Piece<kWidth>* const joined = Partial<kWidth>(partials, per_row, first, 0, column);
    Piece<kWidth> sum = *joined;
    AddPartials(partials, per_row, column, first + 1, last, 1, &sum);
    *joined = sum;
  }
};

// For each tile whose last row begins there and goes on: adds its partial sums in order of tile.
template <int kWidth, typename Rows>
struct JoinTilesJob {
  SortedPositions sorted;
  Pieces<kWidth> pieces;
  float* partials;
  Rows out;
  float scale;

  int64_t NumThreads() const { return sorted.num_tiles() * pieces.per_row; }
  SOK_DEVICE void Run(int64_t thread) const {
    const int64_t per_row = pieces.per_row;
    const int64_t t = pieces.LongRowOf(thread);
    const int64_t column = thread - t * per_row;
    const int64_t begin = t * sorted.tile;
    const int64_t end = begin + sorted.tile;
    if (end >= sorted.num_keys) return;  // nothing follows
    const uint32_t row = sorted.rows[end - 1];
    if (sorted.rows[end] != row) return;
    if (begin > 0 && sorted.rows[begin - 1] == row) return;  // begins in an earlier tile
    const int64_t last_tile = (EndOfRow(sorted, row, end) - 1) / sorted.tile;
    const int64_t next_group = (t / kGroup + 1) * kGroup;  // its first tile
    const int64_t last = last_tile < next_group ? last_tile : next_group - 1;
    Piece<kWidth> sum = *Partial<kWidth>(partials, per_row, t, 1, column);
    AddPartials(partials, per_row, column, t + 1, last, 1, &sum);
    AddPartials(partials, per_row, column, next_group, last_tile, kGroup, &sum);
    for (int i = 0; i < kWidth; ++i) sum.x[i] *= scale;
    *PieceIn<kWidth>(out, row - sorted.first_row, column) = sum;
  }
};

struct ZeroJob {
  float* values;
  int64_t count;

  int64_t NumThreads() const { return count; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i < count) values[i] = 0.0f;
  }
};

// The sums of all batches: those of wide rows in one launch, of narrow ones in another.
template <typename Grads, typename Rows>
class Sums {
 public:
  void Add(const Samples& samples, int64_t num_unique, int64_t dim, bool wide, const Grads& grads,
           const Rows& out) {
    if (num_unique == 0 || samples.num_keys == 0) return;
    batches_.push_back({&samples, num_unique, dim});
    targets_.push_back({grads, out, wide});
  }
  // Positions that are sorted already, with their shares.
  void AddSorted(const SortedBatch& sorted, int64_t dim, bool wide, const Grads& grads,
                 const Rows& out) {
    if (sorted.positions.num_keys == 0) return;
    sorted_.push_back(sorted);
    batches_.push_back({nullptr, 0, dim});
    targets_.push_back({grads, out, wide});
  }
  void Launch(Stream stream, Workspace& workspace, float scale = 1.0f) {
    if (batches_.empty()) return;
    const Workspace::Scope scope(workspace, stream);
    if (sorted_.empty()) sorted_ = SortPositions(stream, workspace, batches_);
    std::vector<float*> partials;
    for (size_t b = 0; b < sorted_.size(); ++b) {
      partials.push_back(
          workspace.Take<float>(2 * sorted_[b].positions.num_tiles() * batches_[b].dim));
    }
    LaunchWidth<1>(stream, partials, scale);
    LaunchWidth<4>(stream, partials, scale);
  }

 private:
  struct Target {
    Grads grads;
    Rows out;
    bool wide;
  };

  template <int kWidth>
  void LaunchWidth(Stream stream, const std::vector<float*>& partials, float scale) const {
    std::vector<SumTilesJob<kWidth, Grads, Rows>> sums;
    std::vector<JoinGroupsJob<kWidth>> groups;
    std::vector<JoinTilesJob<kWidth, Rows>> joins;
    for (size_t b = 0; b < sorted_.size(); ++b) {
      const Target& target = targets_[b];
      if (target.wide != (kWidth == 4)) continue;
      const SortedBatch& sorted = sorted_[b];
      const Pieces<kWidth> pieces(batches_[b].dim);
      sums.push_back(
          {sorted.positions, sorted.shares, target.grads, pieces, target.out, partials[b], scale});
      if (sorted.positions.num_tiles() > kGroup) {
        groups.push_back({sorted.positions, pieces, partials[b]});
      }
      if (sorted.positions.num_tiles() > 1) {
        joins.push_back({sorted.positions, pieces, partials[b], target.out, scale});
      }
    }
    LaunchJobs(stream, sums);
    LaunchJobs(stream, groups);
    LaunchJobs(stream, joins);
  }

  std::vector<SortedBatch> sorted_;
  std::vector<PositionBatch> batches_;
  std::vector<Target> targets_;
};

}  // namespace

void CombineGradient(Stream stream, Workspace& workspace,
                     const std::vector<CombineGradientBatch>& batches, bool all_occur) {
  std::vector<ZeroJob> zeros;
  Sums<DenseRows<const float>, DenseRows<float>> sums;
  for (const CombineGradientBatch& batch : batches) {
    if (!all_occur) zeros.push_back({batch.out, batch.num_unique * batch.dim});
    sums.Add(batch.samples, batch.num_unique, batch.dim,
             batch.dim % 4 == 0 && Aligned16(batch.grad) && Aligned16(batch.out),
             {batch.grad, batch.dim}, {batch.out, batch.dim});
  }
  LaunchJobs(stream, zeros);
  sums.Launch(stream, workspace);
}

void CombineGradient(Stream stream, Workspace& workspace,
                     const std::vector<ScatteredGradientBatch>& batches) {
  Sums<DenseRows<const float>, ScatteredRows<float>> sums;
  for (const ScatteredGradientBatch& batch : batches) {
    const bool wide =
        batch.aligned && batch.dim % 4 == 0 && Aligned16(batch.grad) && Aligned16(batch.words);
    sums.Add(batch.samples, batch.num_unique, batch.dim, wide, {batch.grad, batch.dim},
             {batch.words, batch.offsets});
  }
  sums.Launch(stream, workspace);
}

void SumScatteredRows(Stream stream, Workspace& workspace,
                      const std::vector<ScatteredSumBatch>& batches, float scale) {
  Sums<ScatteredRows<const float>, DenseRows<float>> sums;
  for (const ScatteredSumBatch& batch : batches) {
    SortedBatch sorted;
    sorted.positions = {batch.rows,
                        batch.positions,
                        batch.num_rows,
                        batch.first_row,
                        TileOf(batch.num_rows, batch.dim),
                        false};
    const bool wide =
        batch.aligned && batch.dim % 4 == 0 && Aligned16(batch.words) && Aligned16(batch.out);
    sums.AddSorted(sorted, batch.dim, wide, {batch.words, batch.offsets}, {batch.out, batch.dim});
  }
  sums.Launch(stream, workspace, scale);
}

}  // namespace cuda
}  // namespace sok
