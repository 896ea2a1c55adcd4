// Snapshots of device tables: the host tables' form, so that a dump fits either.
//
//     device   whole rows [embedding | slot rows], slots in the optimizer's order
//     snapshot rows, and the saved slots side by side, by name
#ifndef SOK_TF_CUDA_SNAPSHOT_H_
#define SOK_TF_CUDA_SNAPSHOT_H_

#include "cpp/core/cpu/table.h"
#include "cpp/core/cuda/table.h"

namespace sok {

// As CpuTable::Export. Waits.
TableSnapshot ExportSnapshot(cuda::CudaTable& table, cuda::Stream stream, bool with_slots,
                             bool evict);

// As CpuTable::Import. Waits.
void ImportSnapshot(cuda::CudaTable& table, cuda::Stream stream, const TableSnapshot& snapshot,
                    bool replace);

}  // namespace sok

#endif  // SOK_TF_CUDA_SNAPSHOT_H_
