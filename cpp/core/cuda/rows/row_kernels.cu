#include <cooperative_groups.h>

#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/index/bucket_memory.cuh"
#include "cpp/core/cuda/index/probe.h"
#include "cpp/core/cuda/rows/row_access.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/rows/walk.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// Lanes that have a row, of a warp that `left` rows are left for.
SOK_DEVICE uint32_t InWarp(int64_t left) {
  return left < kWarp ? static_cast<uint32_t>(left) : kWarp;
}

template <int kWidth, bool kOwes>
struct FindAndCopyJob {
  TableRef table;
  const uint64_t* keys;
  int64_t num_keys;
  Places rows;
  uint8_t* found;
  Pieces<kWidth> pieces;

  FindAndCopyJob() = default;
  explicit FindAndCopyJob(const FindBatch& batch)
      : table(batch.table),
        keys(batch.keys),
        num_keys(batch.num_keys),
        rows(batch.rows),
        found(batch.found),
        pieces(batch.table.dim) {}

  int64_t NumThreads() const { return num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
    const int64_t first = i - warp.thread_rank();
    if (first >= num_keys) return;  // the whole warp
    uint64_t key = 0;
    const float* row = nullptr;
    float* to = nullptr;
    if (i < num_keys) {
      to = rows.Row(i, table.dim);
      key = keys[i];
      const uint32_t row_number = FindRow(ReadOnlyMemory(), table.index, HashKey(key), key);
      if (row_number != kNoRow) row = table.Row(row_number);
      if (found != nullptr) found[i] = row_number != kNoRow ? 1 : 0;
    }
    CopyRowsOut<kWidth, kOwes>(warp, table, pieces, InWarp(num_keys - first), key, row, to);
  }
};

template <int kWidth, bool kOwes>
struct CopyRowsJob {
  TableRef table;
  const uint32_t* row_numbers;
  Count num_rows;
  Places rows;
  Pieces<kWidth> pieces;

  CopyRowsJob() = default;
  explicit CopyRowsJob(const CopyBatch& batch)
      : table(batch.table),
        row_numbers(batch.row_numbers),
        num_rows(batch.num_rows),
        rows(batch.rows),
        pieces(batch.table.dim) {}

  int64_t NumThreads() const { return num_rows.most; }
  SOK_DEVICE void Run(int64_t i) const {
    const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
    const int64_t first = i - warp.thread_rank();
    const int64_t count = num_rows.Get();
    if (first >= count) return;
    const float* row = nullptr;
    float* to = nullptr;
    if (i < count) {
      to = rows.Row(i, table.dim);
      if (row_numbers[i] != kNoRow) row = table.Row(row_numbers[i]);
    }
    CopyRowsOut<kWidth, kOwes>(warp, table, pieces, InWarp(count - first), 0, row, to);
  }
};

// One launch for the batches of each kind: pieces wide or not, rows that owe steps or do not.
template <template <int, bool> class Job, typename Batch, int kWidth, bool kOwes>
void LaunchKind(Stream stream, const std::vector<Batch>& batches) {
  std::vector<Job<kWidth, kOwes>> jobs;
  for (const Batch& batch : batches) {
    const TableRef& table = batch.table;
    const bool wide = table.dim % 4 == 0 && batch.rows.aligned && Aligned16(batch.rows.begin);
    const bool owes = table.history.kind != ReplayKind::kNothing && table.history.now > 0;
    if (wide != (kWidth == 4) || owes != kOwes) continue;
    jobs.emplace_back(batch);
  }
  LaunchJobs(stream, jobs);
}

template <template <int, bool> class Job, typename Batch>
void LaunchAll(Stream stream, const std::vector<Batch>& batches) {
  LaunchKind<Job, Batch, 4, false>(stream, batches);
  LaunchKind<Job, Batch, 4, true>(stream, batches);
  LaunchKind<Job, Batch, 1, false>(stream, batches);
  LaunchKind<Job, Batch, 1, true>(stream, batches);
}

// One warp per row: these calls are rare (assign, sweep), so a simple kernel is enough.
__global__ void __launch_bounds__(kThreads)
    CatchUpKernel(TableRef table, const uint32_t* row_numbers, const uint8_t* take,
                  Count num_rows) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread() / kWarp;
  if (i >= num_rows.Get() || (take != nullptr && take[i] == 0)) return;
  float* const row = table.Row(row_numbers == nullptr ? static_cast<uint32_t>(i) : row_numbers[i]);
  const HistoryRef& history = table.history;
  const Debt debt = DebtOf(history, LastStep(table, row));
  warp.sync();  // all lanes have read last_step before one writes it
  if (debt.none) return;
  const bool has_momentum = history.kind != ReplayKind::kDecay;
  const bool has_velocity = has_momentum && history.kind != ReplayKind::kMomentum;
  for (int64_t d = warp.thread_rank(); d < table.dim; d += kWarp) {
    row[d] = ReadPiece<1>(table, debt, row, d).x[0];
    if (has_momentum) row[table.dim + d] *= debt.momentum;
    if (has_velocity) row[2 * table.dim + d] *= debt.velocity;
  }
  if (warp.thread_rank() == 0) {
    *reinterpret_cast<uint32_t*>(row + table.last_step_offset) = history.base + history.now;
  }
}

// One warp per row here too.
__global__ void __launch_bounds__(kThreads)
    WriteRowsKernel(TableRef table, const uint32_t* row_numbers, const uint8_t* take,
                    int64_t num_rows, int64_t width, const float* rows) {
  const int64_t i = GlobalThread() / kWarp;
  if (i >= num_rows || (take != nullptr && take[i] == 0)) return;
  float* const row = table.Row(row_numbers[i]);
  for (int64_t d = GlobalThread() % kWarp; d < width; d += kWarp) row[d] = rows[i * width + d];
}

__global__ void __launch_bounds__(kThreads)
    CopyWholeRowsKernel(TableRef table, const uint32_t* row_numbers, int64_t num_rows,
                        float* rows) {
  const int64_t i = GlobalThread() / kWarp;
  if (i >= num_rows) return;
  const float* const row = table.Row(row_numbers[i]);
  for (int64_t d = GlobalThread() % kWarp; d < table.row_floats; d += kWarp) {
    rows[i * table.row_floats + d] = row[d];
  }
}

__global__ void __launch_bounds__(kThreads)
    MoveRowsKernel(TableRef from, TableRef to, const int32_t* from_column, Count num_rows) {
  const int64_t i = GlobalThread() / kWarp;
  if (i >= num_rows.Get()) return;
  const float* const old_row = from.Row(static_cast<uint32_t>(i));
  float* const new_row = to.Row(static_cast<uint32_t>(i));
  for (int64_t d = GlobalThread() % kWarp; d < to.row_floats; d += kWarp) {
    int32_t column = from_column[d];
    const bool may_be_unknown = column < kInitialColumn;
    if (may_be_unknown) column = KeptUnlessUnknown(column);
    const float kept = column >= 0 ? old_row[column] : 0.0f;
    const bool start = column < 0 || (may_be_unknown && kept != kept);
    new_row[d] = start ? to.slot_initial[d - to.dim] : kept;
  }
}

__global__ void __launch_bounds__(kThreads)
    SetChunksKernel(float** chunks, int64_t first, int64_t num_chunks, float* base,
                    int64_t chunk_floats) {
  const int64_t i = GlobalThread();
  if (i < num_chunks) chunks[first + i] = base + i * chunk_floats;
}

}  // namespace

void FindAndCopy(Stream stream, const std::vector<FindBatch>& batches) {
  LaunchAll<FindAndCopyJob>(stream, batches);
  for (const FindBatch& batch : batches) {
    if (IsWalked(batch.table)) Walk(stream, batch.table, {batch.num_keys, batch.keys}, batch.rows);
  }
}

void CopyRows(Stream stream, const std::vector<CopyBatch>& batches) {
  LaunchAll<CopyRowsJob>(stream, batches);
  for (const CopyBatch& batch : batches) {
    if (!IsWalked(batch.table)) continue;
    Walk(stream, batch.table, {batch.num_rows, nullptr, batch.row_numbers}, batch.rows);
  }
}

void CatchUpRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
                 const uint8_t* take, Count num_rows) {
  if (IsWalked(table)) {
    return WalkInPlace(stream, table, {num_rows, nullptr, row_numbers, take});
  }
  Launch(CatchUpKernel, num_rows.most * kWarp, stream, table, row_numbers, take, num_rows);
}

void WriteRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
               const uint8_t* take, int64_t num_rows, int64_t width, const float* rows) {
  Launch(WriteRowsKernel, num_rows * kWarp, stream, table, row_numbers, take, num_rows, width,
         rows);
}

void CopyWholeRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
                   int64_t num_rows, float* rows) {
  Launch(CopyWholeRowsKernel, num_rows * kWarp, stream, table, row_numbers, num_rows, rows);
}

void MoveRows(Stream stream, const TableRef& from, const TableRef& to, const int32_t* from_column,
              Count num_rows) {
  Launch(MoveRowsKernel, num_rows.most * kWarp, stream, from, to, from_column, num_rows);
}

void SetChunks(Stream stream, float** chunks, int64_t first, int64_t num_chunks, float* base,
               int64_t chunk_floats) {
  Launch(SetChunksKernel, num_chunks, stream, chunks, first, num_chunks, base, chunk_floats);
}

}  // namespace cuda
}  // namespace sok
