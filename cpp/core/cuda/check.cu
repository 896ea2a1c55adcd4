#include <algorithm>

#include "cpp/core/cuda/check.h"
#include "cpp/core/cuda/launch.cuh"

namespace sok {
namespace cuda {
namespace {

constexpr uint64_t kNothing = ~uint64_t{0};

SOK_DEVICE void KeepLeast(uint64_t* least, int64_t i) {
  atomicMin(reinterpret_cast<unsigned long long*>(least), static_cast<unsigned long long>(i));
}

// Thread i looks at sample i and key i; thread 0 also at the ends.
__global__ void __launch_bounds__(kThreads)
    CheckKernel(BatchLimits limits, const uint64_t* keys, int64_t num_keys,
                const int64_t* row_splits, int64_t batch, BatchFinding* finding) {
  const int64_t i = GlobalThread();
  if (row_splits != nullptr) {
    if (i == 0) {
      finding->first_split = row_splits[0];
      finding->last_split = row_splits[batch];
    }
    if (i < batch && !SampleIsLegal(limits, row_splits[i], row_splits[i + 1])) {
      KeepLeast(&finding->sample, i);
    }
  }
  if (limits.key_limit > 0 && i < num_keys && !KeyIsLegal(limits, keys[i])) {
    KeepLeast(&finding->position, i);
  }
}

}  // namespace

void CheckBatch(Stream stream, const BatchInput& input, BatchFinding* finding) {
  Check(cudaMemsetAsync(finding, 0xFF, sizeof(BatchFinding), stream), "cudaMemsetAsync");
  const int64_t for_samples = input.row_splits == nullptr ? 0 : std::max<int64_t>(1, input.batch);
  const int64_t for_keys = input.limits.key_limit > 0 ? input.num_keys : 0;
  Launch(CheckKernel, std::max(for_samples, for_keys), stream, input.limits, input.keys,
         input.num_keys, input.row_splits, input.batch, finding);
}

void RefuseFound(Stream stream, const BatchInput& input, const BatchFinding& finding) {
  const bool has_samples = input.row_splits != nullptr;
  CheckMultiple(input.table, input.limits, has_samples, has_samples ? input.batch : input.num_keys);
  if (has_samples) {
    CheckEnds(input.table, finding.first_split, finding.last_split, input.num_keys);
    if (finding.sample != kNothing) {
      int64_t splits[2];
      CopyToHost(stream, splits, input.row_splits + finding.sample, sizeof(splits));
      RefuseSample(input.table, input.limits, static_cast<int64_t>(finding.sample), splits[0],
                   splits[1]);
    }
  }
  if (finding.position != kNothing) {
    uint64_t key;
    CopyToHost(stream, &key, input.keys + finding.position, sizeof(key));
    RefuseKey(input.table, input.limits, key, static_cast<int64_t>(finding.position));
  }
}

}  // namespace cuda
}  // namespace sok
