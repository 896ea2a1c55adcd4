#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <limits>
#include <type_traits>

#include "cpp/core/cuda/apply.h"
#include "cpp/core/cuda/combine.h"
#include "cpp/core/cuda/history.h"
#include "cpp/core/cuda/index.cuh"
#include "cpp/core/cuda/launch.cuh"
#include "cpp/core/cuda/rows.cuh"
#include "cpp/core/cuda/unique.h"
#include "cpp/core/cuda/walk.cuh"
#include "cpp/core/rules.h"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// One step on the rows of a batch.
struct Batch {
  TableRef table;
  const uint32_t* row_numbers;  // [num_rows], unique
  const float* grads;           // [num_rows, dim]
  Count num_rows;
  float decay;       // 1 - weight_decay * learning_rate
  float clip_value;  // infinite for none
};

// The step that a row updated now was last brought up to.
SOK_DEVICE uint32_t ThisStep(const HistoryRef& history) { return history.base + history.now + 1; }

// Catches a piece of a row up; x[s] are its slots, x[0] the embedding.
template <int kSlots, int kWidth>
SOK_DEVICE void CatchUpPiece(const HistoryRef& history, const Debt& debt, float decay,
                             Piece<kWidth> (&x)[kSlots + 1]) {
  if (!debt.none) {
    // Rules of three slots read velocity_hat; those of fewer than two have no velocity at all.
    Replay<kWidth>(history, debt, x[kSlots >= 1 ? 1 : 0],
                   x[kSlots == 3   ? 3
                     : kSlots >= 2 ? 2
                                   : 0],
                   &x[0]);
    if constexpr (kSlots >= 1) {
      if (history.kind != ReplayKind::kDecay) {
        for (int i = 0; i < kWidth; ++i) x[1].x[i] *= debt.momentum;
      }
    }
    if constexpr (kSlots >= 2) {
      if (history.kind == ReplayKind::kAdam || history.kind == ReplayKind::kAmsgrad) {
        for (int i = 0; i < kWidth; ++i) x[2].x[i] *= debt.velocity;
      }
    }
  }
  if (decay != 1.0f) {
    for (int i = 0; i < kWidth; ++i) x[0].x[i] *= decay;
  }
}

// A warp updates 32 rows together; see rows.cuh. Element-wise rules.
template <typename Rule, int kWidth>
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(Batch batch, Rule rule, Pieces<kWidth> pieces) {
  constexpr int kSlots = Rule::kSlots;
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const TableRef& table = batch.table;
  const bool owes = table.history.kind != ReplayKind::kNothing;
  const int64_t count = batch.num_rows.Get();
  const int64_t i = GlobalThread();
  const int64_t first = i - warp.thread_rank();
  if (first >= count) return;  // the whole warp
  float* row = nullptr;
  Debt debt;
  if (i < count && batch.row_numbers[i] != kNoRow) {
    row = table.Row(batch.row_numbers[i]);
    if (owes) debt = DebtOf(table.history, LastStep(table, row));
  }
  const uint32_t in_warp = count - first < kWarp ? static_cast<uint32_t>(count - first) : kWarp;
  const uint32_t num_pieces = in_warp * pieces.per_row;
  const Piece<kWidth>* const grads =
      reinterpret_cast<const Piece<kWidth>*>(batch.grads) + first * int64_t{pieces.per_row};
  for (uint32_t start = 0; start < num_pieces; start += kWarp) {
    const uint32_t piece = start + warp.thread_rank();
    const uint32_t lane = pieces.RowOf(piece) % kWarp;
    float* const target = ShuffleRow(warp, row, lane);
    Debt target_debt;
    if (owes) target_debt = ShuffleDebt(warp, debt, lane);
    if (piece >= num_pieces || target == nullptr) continue;
    const uint32_t column = piece - lane * pieces.per_row;
    const Piece<kWidth> grad = grads[piece];
    Piece<kWidth> x[kSlots + 1];
#pragma unroll
    for (int s = 0; s <= kSlots; ++s) x[s] = LoadPiece<kWidth>(target + s * table.dim, column);
    if (owes) CatchUpPiece<kSlots, kWidth>(table.history, target_debt, batch.decay, x);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      float element[kSlots + 1];  // as a row of one float with its slots behind it
#pragma unroll
      for (int s = 0; s <= kSlots; ++s) element[s] = x[s].x[e];
      rule.Update(Clip(grad.x[e], batch.clip_value), element, 1);
#pragma unroll
      for (int s = 0; s <= kSlots; ++s) x[s].x[e] = element[s];
    }
#pragma unroll
    for (int s = 0; s <= kSlots; ++s) {
      reinterpret_cast<Piece<kWidth>*>(target + s * table.dim)[column] = x[s];
    }
  }
  if (owes && row != nullptr) {
    *reinterpret_cast<uint32_t*>(row + table.last_step_offset) = ThisStep(table.history);
  }
}

// Row-wise Adagrad needs the whole row first. Eight lanes share a row: lane j sums the squares of
// elements j, j + 8, ..., which are the partial sums of the CPU, and they are added in its order.
constexpr int kRowLanes = 8;

__global__ void __launch_bounds__(kThreads)
    UpdateRowWiseKernel(Batch batch, RowWiseAdagradRule rule) {
  const auto lanes = cg::tiled_partition<kRowLanes>(cg::this_thread_block());
  const TableRef& table = batch.table;
  const int64_t i = GlobalThread() / kRowLanes;
  if (i >= batch.num_rows.Get() || batch.row_numbers[i] == kNoRow) return;  // all eight
  float* const row = table.Row(batch.row_numbers[i]);
  const float* const grad = batch.grads + i * table.dim;
  const bool owes = table.history.kind != ReplayKind::kNothing;
  Debt debt;
  if (owes) debt = DebtOf(table.history, LastStep(table, row));
  float partial = 0.0f;
  for (int64_t d = lanes.thread_rank(); d < table.dim; d += kRowLanes) {
    const float g = Clip(grad[d], batch.clip_value);
    partial += g * g;
  }
  float sum = 0.0f;
  for (int j = 0; j < kRowLanes; ++j) sum += lanes.shfl(partial, j);
  // Every lane works the rate out for itself on a copy of the accumulator; one stores it.
  float accumulator[2] = {0.0f, row[table.dim]};
  const float scaled = sum / static_cast<float>(table.dim);
  const float rate = rule.Rate(scaled, accumulator, 1);
  lanes.sync();  // all have read the accumulator and last_step
  for (int64_t d = lanes.thread_rank(); d < table.dim; d += kRowLanes) {
    float w = row[d];
    if (owes) w = w * debt.row * batch.decay;
    row[d] = w - rate * Clip(grad[d], batch.clip_value);
  }
  if (lanes.thread_rank() != 0) return;
  row[table.dim] = accumulator[1];
  if (owes) {
    *reinterpret_cast<uint32_t*>(row + table.last_step_offset) = ThisStep(table.history);
  }
}

// Launches the kernel of a rule.
struct RunRule {
  Stream stream;
  const Batch& batch;

  template <typename Rule>
  void operator()(const Rule& rule) const {
    WithPieceWidth(batch.table.dim, batch.grads, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      Launch(UpdateKernel<Rule, kWidth>, batch.num_rows.most, stream, batch, rule,
             Pieces<kWidth>(batch.table.dim));
    });
  }
  void operator()(const RowWiseAdagradRule& rule) const {
    Launch(UpdateRowWiseKernel, batch.num_rows.most * kRowLanes, stream, batch, rule);
  }
};

// A table with policies gives rows at lookups only: a key that waits, or was evicted since it was
// looked up, has none to update.
void FindRowsToUpdate(Stream stream, CudaTable& table, const uint64_t* unique, Count num_unique,
                      uint32_t* row_numbers) {
  if (table.keeps_records()) {
    FindKeys(stream, table.Ref(), unique, num_unique, row_numbers);
  } else {
    table.FindOrInsertRows(stream, unique, num_unique.most, row_numbers, nullptr,
                           num_unique.actual);
  }
}

}  // namespace

void ApplyGradientsToRows(Stream stream, CudaTable& table, const OptimizerOptions& options,
                          float learning_rate, int64_t step, const uint32_t* row_numbers,
                          const float* grads, int64_t num_rows, const uint32_t* num_actual) {
  CheckStep(options, learning_rate, step);
  const History& history = table.Attach(stream, options);
  table.MakeRoomForStep(stream);
  if (table.keeps_records()) {
    table.CountDroppedGradients(stream, row_numbers, num_rows, num_actual);
  }
  const float no_clip = std::numeric_limits<float>::infinity();
  const Batch batch{table.Ref(),
                    row_numbers,
                    grads,
                    Count(num_rows, num_actual),
                    static_cast<float>(1.0 - AsWritten(options.weight_decay) * learning_rate),
                    options.clip_value > 0.0f ? options.clip_value : no_clip};
  if (IsWalked(batch.table)) {
    Walk(stream, batch.table, {batch.num_rows, nullptr, row_numbers}, nullptr);
  }
  WithRule(options, learning_rate, step, RunRule{stream, batch});
  if (history.owes()) table.AppendStep(stream, learning_rate, step);
}

TableStep::TableStep(Stream stream, CudaTable& table, const OptimizerOptions& options,
                     float learning_rate, int64_t step, const uint64_t* keys, const float* grads,
                     int64_t num_keys, bool keys_are_unique)
    : stream_(stream),
      table_(&table),
      options_(options),
      learning_rate_(learning_rate),
      step_(step),
      grads_(grads),
      num_keys_(num_keys) {
  CheckStep(options, learning_rate, step);
  table.Attach(stream, options);  // slots first, so that new rows have them
  Workspace& workspace = table.workspace();
  scope_ = std::make_unique<Workspace::Scope>(workspace, stream);
  row_numbers_ = workspace.Take<uint32_t>(num_keys);
  if (keys_are_unique) {
    FindRowsToUpdate(stream, table, keys, num_keys, row_numbers_);
    return;
  }
  uint64_t* const unique = workspace.Take<uint64_t>(num_keys);
  inverse_ = workspace.Take<int32_t>(num_keys);
  num_unique_ = workspace.Take<uint32_t>(1);
  Unique(stream, workspace, keys, num_keys, unique, inverse_, num_unique_);
  FindRowsToUpdate(stream, table, unique, Count(num_keys, num_unique_), row_numbers_);
}

void TableStep::Run() {
  const float* grads = grads_;
  if (inverse_ != nullptr) {
    Workspace& workspace = table_->workspace();
    float* const sums = workspace.Take<float>(num_keys_ * table_->dim());
    Samples samples;
    samples.inverse = inverse_;
    samples.num_keys = num_keys_;
    samples.combiner = Combiner::kNone;
    CombineGradient(stream_, workspace, samples, grads_, num_keys_, table_->dim(), sums,
                    /*all_occur=*/true);
    grads = sums;
  }
  ApplyGradientsToRows(stream_, *table_, options_, learning_rate_, step_, row_numbers_, grads,
                       num_keys_, num_unique_);
}

void ApplyGradients(Stream stream, CudaTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys, const float* grads,
                    int64_t num_keys, bool keys_are_unique) {
  TableStep(stream, table, options, learning_rate, step, keys, grads, num_keys, keys_are_unique)
      .Run();
}

}  // namespace cuda
}  // namespace sok
