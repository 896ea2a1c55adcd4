#include <cooperative_groups.h>

#include "cpp/core/adam_series.h"
#include "cpp/core/cuda/index/bucket_memory.cuh"
#include "cpp/core/cuda/index/probe.h"
#include "cpp/core/cuda/rows/row_access.cuh"
#include "cpp/core/cuda/rows/walk.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// The history's records; steps count from its base.
struct WalkedSteps {
  const double* alpha;
  const double* decay;
  SOK_HD double Alpha(uint32_t k) const { return alpha[k]; }
  SOK_HD double Decay(uint32_t k) const { return decay == nullptr ? 1.0 : decay[k]; }
};

// Steps first..end of a row, in which momentum is left, and the factor of the weight decay in later
// steps; a float, as on the CPU.
struct Stretch {
  uint32_t first = 0;
  uint32_t end = 0;
  float rest = 1.0f;
};

SOK_DEVICE Stretch StretchOf(const HistoryRef& history, uint32_t last_step) {
  Stretch stretch;
  stretch.first = 1 + (last_step > history.base ? last_step - history.base : 0);
  stretch.end = stretch.first + history.window;
  if (stretch.end >= history.now) {
    stretch.end = history.now;
  } else if (history.decays) {
    const double* const log_decay = history.log_decay;
    stretch.rest = static_cast<float>(exp(log_decay[history.now] - log_decay[stretch.end]));
  }
  return stretch;
}

SOK_DEVICE uint32_t RowNumber(const TableRef& table, const WalkedRows& rows, int64_t i) {
  if (rows.take != nullptr && rows.take[i] == 0) return kNoRow;
  if (rows.keys != nullptr) {
    return FindRow(ReadOnlyMemory(), table.index, HashKey(rows.keys[i]), rows.keys[i]);
  }
  return rows.row_numbers != nullptr ? rows.row_numbers[i] : static_cast<uint32_t>(i);
}

// One warp per 32 rows, whose elements are numbered consecutively; see row_access.cuh.
__global__ void __launch_bounds__(kThreads)
    WalkKernel(TableRef table, WalkedRows rows, Pieces<1> elements, Places out) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const HistoryRef& history = table.history;
  const int64_t count = rows.num_rows.Get();
  const int64_t i = GlobalThread();
  const int64_t first = i - warp.thread_rank();
  if (first >= count) return;  // the whole warp
  float* row = nullptr;        // null if it owes nothing
  float* to = nullptr;         // null in place
  Stretch stretch;
  if (i < count) {
    const uint32_t number = RowNumber(table, rows, i);
    if (number != kNoRow) {
      row = table.Row(number);
      if (out.begin != nullptr) to = out.Row(i, table.dim);
      stretch = StretchOf(history, LastStep(table, row));
      if (stretch.first > history.now) row = nullptr;
    }
  }
  const WalkedSteps steps{history.alpha, history.decay};
  const uint32_t in_warp = count - first < kWarp ? static_cast<uint32_t>(count - first) : kWarp;
  const uint32_t num_elements = in_warp * elements.per_row;
  for (uint32_t start = 0; start < num_elements; start += kWarp) {
    const uint32_t e = start + warp.thread_rank();
    const uint32_t lane = elements.RowOf(e) % kWarp;
    float* const target = ShuffleRow(warp, row, lane);
    float* const copy = ShuffleRow(warp, to, lane);
    const uint32_t from = warp.shfl(stretch.first, lane);
    const uint32_t end = warp.shfl(stretch.end, lane);
    const float rest = warp.shfl(stretch.rest, lane);
    if (e >= num_elements || target == nullptr) continue;
    const uint32_t column = e - lane * elements.per_row;
    float* const w = target + column;
    float* const m = w + table.dim;
    float* const v = m + table.dim;
    float* const walked = copy == nullptr ? w : copy + column;
    WalkSteps<1>(steps, from, end, rest, history.beta_1, history.beta_2, history.epsilon, w, m, v,
                 1, walked);
    if (copy != nullptr) continue;
    *m *= history.beta_1_power[history.now + 1 - from];
    *v *= history.beta_2_power[history.now + 1 - from];
  }
  if (to == nullptr && row != nullptr) {
    *reinterpret_cast<uint32_t*>(row + table.last_step_offset) = history.base + history.now;
  }
}

}  // namespace

void Walk(Stream stream, const TableRef& table, const WalkedRows& rows, const Places& out) {
  Launch(WalkKernel, rows.num_rows.most, stream, table, rows, Pieces<1>(table.dim), out);
}

void WalkInPlace(Stream stream, const TableRef& table, const WalkedRows& rows) {
  Walk(stream, table, rows, Places());
}

}  // namespace cuda
}  // namespace sok
