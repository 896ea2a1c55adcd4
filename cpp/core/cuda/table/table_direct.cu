// A CudaTable without a hashtable: its rows, and the check of its keys.
//
// The table has all its rows from the start: `next_row` and `size` of the counters are set once, so
// that the history, slots and snapshots treat the rows as those of any other table. Nothing grows
// and nothing is inserted. A lookup must only refuse bad keys before anything changes: the host
// waits for one number that says whether all keys are good.
#include "cpp/core/cuda/rows/direct_row_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

void CudaTable::Impl::MakeDirectRows() {
  const int64_t num_rows = static_cast<int64_t>(direct.num_rows);
  arena.Reserve(stream, (num_rows + chunk_rows() - 1) / chunk_rows(), chunk_rows());
  Counters full = {};
  full.next_row = static_cast<uint32_t>(num_rows);
  full.size = static_cast<uint32_t>(num_rows);
  CopyToDevice(stream, counters.data(), &full, sizeof(full));
  rows.Set(num_rows);
  size.Set(num_rows);
  WriteInitialRows(stream, Ref(), direct);
}

void CudaTable::Impl::FindDirectRows(Stream stream, const std::vector<DirectBatch>& batches) {
  if (batches.empty()) return;
  const size_t n = batches.size();
  Workspace& workspace = batches[0].table->workspace;
  const Workspace::Scope scope(workspace, stream);
  uint64_t* const first_refused = workspace.Take<uint64_t>(n);
  std::vector<RowNumberBatch> numbers;
  for (const auto& [table, keys, num_keys, row_numbers] : batches) {
    numbers.push_back({table->direct, keys, num_keys, row_numbers});
  }
  ComputeRowNumbers(stream, numbers, first_refused);
  std::vector<uint64_t> positions(n);
  CopyToHost(stream, positions.data(), first_refused, n * sizeof(uint64_t));
  for (size_t b = 0; b < n; ++b) {
    if (positions[b] == kNoPosition) continue;
    uint64_t key = 0;
    CopyToHost(stream, &key, batches[b].keys + positions[b], sizeof(key));
    RefuseDirectKey(batches[b].table->options, key);
  }
}

void CudaTable::Impl::FindDirect(const uint64_t* keys, int64_t num_keys, float* out,
                                 uint8_t* found) {
  const Workspace::Scope scope(workspace, stream);
  uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
  FindDirectRows(stream, {{this, keys, num_keys, row_numbers}});
  CopyRows(stream, {{Ref(), row_numbers, num_keys, out}});
  if (found == nullptr || num_keys == 0) return;
  CudaCheck(cudaMemsetAsync(found, 1, static_cast<size_t>(num_keys), stream), "cudaMemsetAsync");
}

}  // namespace cuda
}  // namespace sok
