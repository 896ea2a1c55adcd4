#include <cooperative_groups.h>

#include <type_traits>

#include "cpp/core/cuda/memory.cuh"
#include "cpp/core/cuda/probe.h"
#include "cpp/core/cuda/rows.cuh"
#include "cpp/core/cuda/rows_ops.cuh"
#include "cpp/core/cuda/walk.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// Calls f(width, owes) with compile-time constants.
template <typename F>
void WithPieces(const TableRef& table, const void* dense, F&& f) {
  const bool owes = table.history.kind != ReplayKind::kNothing && table.history.now > 0;
  WithPieceWidth(table.dim, dense, [&](auto width) {
    if (owes) {
      f(width, std::true_type{});
    } else {
      f(width, std::false_type{});
    }
  });
}

template <int kWidth, bool kOwes>
__global__ void __launch_bounds__(kThreads)
    FindAndCopyKernel(TableRef table, Pieces<kWidth> pieces, const uint64_t* keys, int64_t num_keys,
                      float* rows, uint8_t* found) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread();
  const int64_t first = i - warp.thread_rank();
  if (first >= num_keys) return;  // the whole warp
  uint64_t key = 0;
  const float* row = nullptr;
  if (i < num_keys) {
    key = keys[i];
    const uint32_t row_number = FindRow(ReadOnlyMemory(), table.index, HashKey(key), key);
    if (row_number != kNoRow) row = table.Row(row_number);
    if (found != nullptr) found[i] = row_number != kNoRow ? 1 : 0;
  }
  CopyRowsOut<kWidth, kOwes>(warp, table, pieces, first, num_keys, key, row, rows);
}

template <int kWidth, bool kOwes>
__global__ void __launch_bounds__(kThreads)
    CopyRowsKernel(TableRef table, Pieces<kWidth> pieces, const uint32_t* row_numbers,
                   Count num_rows, float* rows) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread();
  const int64_t first = i - warp.thread_rank();
  const int64_t count = num_rows.Get();
  if (first >= count) return;
  const float* row = nullptr;
  if (i < count && row_numbers[i] != kNoRow) row = table.Row(row_numbers[i]);
  CopyRowsOut<kWidth, kOwes>(warp, table, pieces, first, count, 0, row, rows);
}

// A warp for each row: these are the rare calls (assign, sweep), so simple is enough.
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

// A warp for each row here too.
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

void FindAndCopy(Stream stream, const TableRef& table, const uint64_t* keys, int64_t num_keys,
                 float* rows, uint8_t* found) {
  WithPieces(table, rows, [&](auto width, auto owes) {
    constexpr int kWidth = decltype(width)::value;
    Launch(FindAndCopyKernel<kWidth, decltype(owes)::value>, num_keys, stream, table,
           Pieces<kWidth>(table.dim), keys, num_keys, rows, found);
  });
  if (IsWalked(table)) Walk(stream, table, {num_keys, keys}, rows);
}

void CopyRows(Stream stream, const TableRef& table, const uint32_t* row_numbers, Count num_rows,
              float* rows) {
  WithPieces(table, rows, [&](auto width, auto owes) {
    constexpr int kWidth = decltype(width)::value;
    Launch(CopyRowsKernel<kWidth, decltype(owes)::value>, num_rows.most, stream, table,
           Pieces<kWidth>(table.dim), row_numbers, num_rows, rows);
  });
  if (IsWalked(table)) Walk(stream, table, {num_rows, nullptr, row_numbers}, rows);
}

void CatchUpRows(Stream stream, const TableRef& table, const uint32_t* row_numbers,
                 const uint8_t* take, Count num_rows) {
  if (IsWalked(table)) {
    return Walk(stream, table, {num_rows, nullptr, row_numbers, take}, nullptr);
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
