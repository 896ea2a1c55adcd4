#include <cooperative_groups.h>

#include "cpp/core/cuda/direct.cuh"
#include "cpp/core/cuda/rows.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

__global__ void __launch_bounds__(kThreads)
    NumberKeysKernel(DirectRows direct, const uint64_t* keys, Count num_keys, uint32_t* rows,
                     uint64_t* first_refused) {
  const int64_t i = GlobalThread();
  if (i >= num_keys.Get()) return;
  const uint64_t key = keys[i];
  const bool has = direct.Has(key);
  rows[i] = has ? direct.RowOf(key) : kNoRow;
  if (!has) {
    atomicMin(reinterpret_cast<unsigned long long*>(first_refused),  // NOLINT: what CUDA takes
              static_cast<unsigned long long>(i));                   // NOLINT
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteInitialRowsKernel(TableRef table, DirectRows direct) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const uint64_t i = static_cast<uint64_t>(GlobalThread());
  float* const row = i < direct.num_rows ? table.Row(static_cast<uint32_t>(i)) : nullptr;
  WriteNewRows(warp, table, direct.KeyOf(i), row);
}

__global__ void __launch_bounds__(kThreads)
    NumberRowsKernel(int64_t first, int64_t num_rows, uint32_t* rows) {
  const int64_t i = GlobalThread();
  if (i < num_rows) rows[i] = static_cast<uint32_t>(first + i);
}

}  // namespace

void NumberKeys(Stream stream, const DirectRows& direct, const uint64_t* keys, Count num_keys,
                uint32_t* rows, uint64_t* first_refused) {
  Check(cudaMemsetAsync(first_refused, 0xFF, sizeof(uint64_t), stream), "cudaMemsetAsync");
  Launch(NumberKeysKernel, num_keys.most, stream, direct, keys, num_keys, rows, first_refused);
}

void WriteInitialRows(Stream stream, const TableRef& table, const DirectRows& direct) {
  Launch(WriteInitialRowsKernel, static_cast<int64_t>(direct.num_rows), stream, table, direct);
}

void NumberRows(Stream stream, int64_t first, int64_t num_rows, uint32_t* rows) {
  Launch(NumberRowsKernel, num_rows, stream, first, num_rows, rows);
}

}  // namespace cuda
}  // namespace sok
