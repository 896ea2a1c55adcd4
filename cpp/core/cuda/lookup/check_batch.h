// Checks of a batch on the device, as CheckBatch does them on the host (cpu/lookup.h).
//
//     CheckBatches  ->  BatchFinding, in device memory  =copied with other counts=>  RefuseFound
//
// The first offender is found by an atomic minimum over positions; what it looks like is fetched
// only when there is one. So the good batches of many tables cost one kernel, and 32 bytes each of
// a copy that is made anyway.
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

// Async. Writes `findings` [number of inputs], in device memory.
void CheckBatches(Stream stream, const std::vector<BatchInput>& inputs, BatchFinding* findings);

// Throws std::invalid_argument in the words of the CPU's CheckBatch for a batch of which `finding`,
// now on the host, says that it is bad. Waits only then.
void RefuseFound(Stream stream, const BatchInput& input, const BatchFinding& finding);

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_CHECK_BATCH_H_
