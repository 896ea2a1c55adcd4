// Checks a batch on the device, as CheckBatch (cpu/lookup.h) does on the host.
//
//     CheckBatches  ->  BatchFinding, in device memory  =copied with other counts=>  RefuseFound
//
// An atomic minimum over positions finds the first bad sample or key; its values are fetched only
// if there is one. So the good batches of many tables cost one kernel, and 32 bytes each in a copy
// that is made anyway.
#ifndef SOK_CORE_CUDA_LOOKUP_CHECK_BATCH_H_
#define SOK_CORE_CUDA_LOOKUP_CHECK_BATCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/batch.h"
#include "cpp/core/cuda/device/device.h"

namespace sok {
namespace cuda {

// One table's part of a batch. Pointers are to device memory.
struct BatchInput {
  std::string table;
  BatchLimits limits;
  const uint64_t* keys = nullptr;  // [num_keys]
  int64_t num_keys = 0;
  const int64_t* row_splits = nullptr;  // [batch + 1]; null: no samples
  int64_t batch = 0;
};

struct BatchFinding {
  uint64_t sample;    // the first that is not legal; all bits set: none
  uint64_t position;  // of the first key that is not legal; all bits set: none
  int64_t first_split, last_split;
};

// Async. Writes `findings` [number of inputs], in device memory, of which all bits must be set.
void CheckBatches(Stream stream, const std::vector<BatchInput>& inputs, BatchFinding* findings);

// If `finding`, now on the host, says that the batch is bad: waits, and throws
// std::invalid_argument with the message of the CPU's CheckBatch.
void RefuseFound(Stream stream, const BatchInput& input, const BatchFinding& finding);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_CHECK_BATCH_H_
