#include <cooperative_groups.h>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/rows/direct_row_kernels.cuh"
#include "cpp/core/cuda/rows/row_access.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

struct RowNumbersJob {
  RowNumberBatch batch;
  uint64_t* first_refused;

  int64_t NumThreads() const { return batch.num_keys.most; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= batch.num_keys.Get()) return;
    const uint64_t key = batch.keys[i];
    const bool has = batch.direct.Has(key);
    batch.rows[i] = has ? batch.direct.RowOf(key) : kNoRow;
    if (!has) {
      atomicMin(reinterpret_cast<unsigned long long*>(first_refused),  // NOLINT: what CUDA takes
                static_cast<unsigned long long>(i));                   // NOLINT
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    WriteInitialRowsKernel(TableRef table, DirectRows direct) {
  const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const uint64_t i = static_cast<uint64_t>(GlobalThread());
  float* const row = i < direct.num_rows ? table.Row(static_cast<uint32_t>(i)) : nullptr;
  WriteNewRows(warp, table, direct.KeyOf(i), row);
}

__global__ void __launch_bounds__(kThreads)
    ListRowNumbersKernel(int64_t first, int64_t num_rows, uint32_t* rows) {
  const int64_t i = GlobalThread();
  if (i < num_rows) rows[i] = static_cast<uint32_t>(first + i);
}

}  // namespace

void ComputeRowNumbers(Stream stream, const std::vector<RowNumberBatch>& batches,
                       uint64_t* first_refused) {
  CudaCheck(cudaMemsetAsync(first_refused, 0xFF, batches.size() * sizeof(uint64_t), stream),
            "cudaMemsetAsync");
  std::vector<RowNumbersJob> jobs;
  for (const RowNumberBatch& batch : batches) jobs.push_back({batch, first_refused + jobs.size()});
  LaunchJobs(stream, jobs);
}

void WriteInitialRows(Stream stream, const TableRef& table, const DirectRows& direct) {
  Launch(WriteInitialRowsKernel, static_cast<int64_t>(direct.num_rows), stream, table, direct);
}

void ListRowNumbers(Stream stream, int64_t first, int64_t num_rows, uint32_t* rows) {
  Launch(ListRowNumbersKernel, num_rows, stream, first, num_rows, rows);
}

}  // namespace cuda
}  // namespace sok
