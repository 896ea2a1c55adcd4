#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <limits>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/rows/history.h"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_access.cuh"
#include "cpp/core/cuda/rows/walk.cuh"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/core/rules.h"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// One table's part of a step.
struct Batch {
  TableRef table;
  const uint32_t* row_numbers;  // [num_rows], unique
  const float* grads;           // [num_rows, dim]
  Count num_rows;
  float decay;       // 1 - weight_decay * learning_rate
  float clip_value;  // infinite for none
};

// The last_step of a row that is updated now.
SOK_DEVICE uint32_t ThisStep(const HistoryRef& history) { return history.base + history.now + 1; }

// Brings a piece of a row up to date, then decays it; x[0] is the embedding, x[s] its slots.
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

// Element-wise rules: a warp updates 32 rows together; see row_access.cuh.
template <typename Rule, int kWidth>
struct UpdateJob {
  Batch batch;
  Rule rule;
  Pieces<kWidth> pieces;

  int64_t NumThreads() const { return batch.num_rows.most; }
  SOK_DEVICE void Run(int64_t i) const {
    constexpr int kSlots = Rule::kSlots;
    const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
    const TableRef& table = batch.table;
    const bool owes = table.history.kind != ReplayKind::kNothing;
    const int64_t count = batch.num_rows.Get();
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
};

// Row-wise Adagrad needs the whole row first. Eight lanes share a row: lane j sums the squares of
// elements j, j + 8, ..., which are the partial sums of the CPU, and they are added in its order.
constexpr int kRowLanes = 8;

struct UpdateRowWiseJob {
  Batch batch;
  RowWiseAdagradRule rule;

  int64_t NumThreads() const { return batch.num_rows.most * kRowLanes; }
  SOK_DEVICE void Run(int64_t thread) const {
    const auto lanes = cg::tiled_partition<kRowLanes>(cg::this_thread_block());
    const TableRef& table = batch.table;
    const int64_t i = thread / kRowLanes;
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
    // Every lane computes the rate on its own copy of the accumulator; one lane stores it.
    float accumulator = row[table.dim];
    const float rate = rule.Rate(sum, &accumulator, table.dim);
    lanes.sync();  // all have read the accumulator and last_step
    for (int64_t d = lanes.thread_rank(); d < table.dim; d += kRowLanes) {
      float w = row[d];
      if (owes) w = w * debt.row * batch.decay;
      row[d] = w - rate * Clip(grad[d], batch.clip_value);
    }
    if (lanes.thread_rank() != 0) return;
    row[table.dim] = accumulator;
    if (owes) {
      *reinterpret_cast<uint32_t*>(row + table.last_step_offset) = ThisStep(table.history);
    }
  }
};

// Launches the jobs of a rule.
struct RunRule {
  Stream stream;
  const std::vector<Batch>& batches;

  template <typename Rule>
  void operator()(const Rule& rule) const {
    LaunchWidth<4>(rule);
    LaunchWidth<1>(rule);
  }
  void operator()(const RowWiseAdagradRule& rule) const {
    std::vector<UpdateRowWiseJob> jobs;
    for (const Batch& batch : batches) jobs.push_back({batch, rule});
    LaunchJobs(stream, jobs);
  }
  template <int kWidth, typename Rule>
  void LaunchWidth(const Rule& rule) const {
    std::vector<UpdateJob<Rule, kWidth>> jobs;
    for (const Batch& batch : batches) {
      const int64_t dim = batch.table.dim;
      const bool wide = dim % 4 == 0 && Aligned16(batch.grads);
      if (wide == (kWidth == 4)) jobs.push_back({batch, rule, Pieces<kWidth>(dim)});
    }
    LaunchJobs(stream, jobs);
  }
};

// One table's rows of the step.
struct RowGradients {
  CudaTable* table;
  const uint32_t* row_numbers;  // [num_rows]
  const float* grads;           // [num_rows, dim]
  Count num_rows;
};

// `number`: the number of the step, the same for all these tables.
void UpdateAlike(Stream stream, const std::vector<RowGradients>& rows,
                 const OptimizerOptions& options, float learning_rate, int64_t number) {
  const float no_clip = std::numeric_limits<float>::infinity();
  std::vector<Batch> batches;
  for (const RowGradients& of_table : rows) {
    CudaTable& table = *of_table.table;
    if (table.keeps_records()) {
      table.CountDroppedGradients(stream, of_table.row_numbers, of_table.num_rows.most,
                                  of_table.num_rows.actual);
    }
    batches.push_back({table.Ref(), of_table.row_numbers, of_table.grads, of_table.num_rows,
                       static_cast<float>(1.0 - AsWritten(options.weight_decay) * learning_rate),
                       options.clip_value > 0.0f ? options.clip_value : no_clip});
  }
  for (const Batch& batch : batches) {
    if (!IsWalked(batch.table)) continue;
    WalkInPlace(stream, batch.table, {batch.num_rows, nullptr, batch.row_numbers});
  }
  WithRule(options, learning_rate, number, RunRule{stream, batches});
  std::vector<CudaTable*> owing;
  owing.reserve(rows.size());
  for (const RowGradients& of_table : rows) {
    if (of_table.table->Attach(stream, options).owes()) owing.push_back(of_table.table);
  }
  CudaTable::AppendStep(stream, owing, learning_rate, number);
}

// Usually one number for all. Restored tables continue counting from their dumps.
void Update(Stream stream, const std::vector<RowGradients>& rows, const OptimizerOptions& options,
            float learning_rate, int64_t step) {
  std::map<int64_t, std::vector<RowGradients>> by_number;
  for (const RowGradients& of_table : rows) {
    by_number[of_table.table->step_number().Of(step)].push_back(of_table);
  }
  for (const auto& [number, alike] : by_number) {
    UpdateAlike(stream, alike, options, learning_rate, number);
  }
  for (const RowGradients& of_table : rows) of_table.table->step_number().Made(step);
}

// The rows to update. In a table with policies only lookups give rows: a key that waits, or was
// evicted since it was looked up, has no row.
void FindRowsToUpdate(Stream stream, const std::vector<CudaTable::TableKeys>& batches) {
  std::vector<FindKeysBatch> finds;
  std::vector<CudaTable::TableKeys> inserting;
  for (const CudaTable::TableKeys& batch : batches) {
    if (batch.table->keeps_records()) {
      finds.push_back({batch.table->Ref(stream), batch.keys,
                       Count(batch.num_keys, batch.num_actual), batch.row_numbers});
    } else {
      inserting.push_back(batch);
    }
  }
  CudaTable::FindOrInsertRows(stream, inserting);
  FindKeys(stream, finds);
}

void RequireDifferentTables(const std::vector<TableGradients>& batches) {
  std::unordered_set<CudaTable*> tables;
  for (const TableGradients& batch : batches) {
    if (tables.insert(batch.table).second) continue;
    throw std::invalid_argument("Each table may occur only once in a step. Received: table '" +
                                batch.table->options().name + "' twice");
  }
}

}  // namespace

void ApplyGradientsToRows(Stream stream, CudaTable& table, const OptimizerOptions& options,
                          float learning_rate, int64_t step, const uint32_t* row_numbers,
                          const float* grads, int64_t num_rows) {
  CheckStep(options, learning_rate, step);
  table.Attach(stream, options);
  table.MakeRoomForStep(stream);
  Update(stream, {{&table, row_numbers, grads, num_rows}}, options, learning_rate, step);
}

void ApplyGradients(Stream stream, const std::vector<TableGradients>& batches,
                    const OptimizerOptions& options, float learning_rate, int64_t step,
                    bool keys_are_unique) {
  CheckStep(options, learning_rate, step);
  RequireDifferentTables(batches);
  if (batches.empty()) return;
  for (const TableGradients& batch : batches) batch.table->CheckOptimizer(options);
  // Slots first, so that new rows have them.
  for (const TableGradients& batch : batches) batch.table->Attach(stream, options);
  Workspace& workspace = batches[0].table->workspace();
  const Workspace::Scope scope(workspace, stream);
  const int64_t num_tables = batches.size();
  uint32_t* const num_unique = workspace.Take<uint32_t>(num_tables);
  std::vector<UniqueBatch> uniques;
  std::vector<CudaTable::TableKeys> keys;
  std::vector<CombineGradientBatch> sums;
  std::vector<RowGradients> rows;
  for (int64_t t = 0; t < num_tables; ++t) {
    const TableGradients& batch = batches[t];
    const int64_t num_keys = batch.num_keys;
    uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
    if (keys_are_unique) {
      keys.push_back({batch.table, batch.keys, num_keys, row_numbers});
      rows.push_back({batch.table, row_numbers, batch.grads, num_keys});
      continue;
    }
    uint64_t* const unique = workspace.Take<uint64_t>(num_keys);
    int32_t* const inverse = workspace.Take<int32_t>(num_keys);
    float* const summed = workspace.Take<float>(num_keys * batch.table->dim());
    uniques.push_back({batch.keys, num_keys, unique, inverse, num_unique + t});
    keys.push_back({batch.table, unique, num_keys, row_numbers, num_unique + t});
    rows.push_back({batch.table, row_numbers, summed, Count(num_keys, num_unique + t)});
    Samples samples;
    samples.inverse = inverse;
    samples.num_keys = num_keys;
    samples.combiner = Combiner::kNone;
    sums.push_back({samples, batch.grads, num_keys, batch.table->dim(), summed});
  }
  Unique(stream, workspace, uniques);
  CombineGradient(stream, workspace, sums, /*all_occur=*/true);
  for (const TableGradients& batch : batches) batch.table->MakeRoomForStep(stream);
  FindRowsToUpdate(stream, keys);  // the last that may fail: then no table has new keys
  Update(stream, rows, options, learning_rate, step);
}

}  // namespace cuda
}  // namespace sok
