#include <algorithm>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/lookup/check_batch.h"

namespace sok {
namespace cuda {
namespace {

constexpr uint64_t kNothing = ~uint64_t{0};

SOK_DEVICE void KeepLeast(uint64_t* least, int64_t i) {
  atomicMin(reinterpret_cast<unsigned long long*>(least), static_cast<unsigned long long>(i));
}

// Thread i checks sample i and key i; thread 0 also copies the ends.
struct CheckJob {
  BatchLimits limits;
  const uint64_t* keys;
  int64_t num_keys;
  const int64_t* row_splits;
  int64_t batch;
  BatchFinding* finding;

  int64_t NumThreads() const {
    const int64_t for_samples = row_splits == nullptr ? 0 : std::max<int64_t>(1, batch);
    return std::max(for_samples, limits.key_limit > 0 ? num_keys : 0);
  }
  SOK_DEVICE void Run(int64_t i) const {
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
};

}  // namespace

void CheckBatches(Stream stream, const std::vector<BatchInput>& inputs, BatchFinding* findings) {
  std::vector<CheckJob> jobs;
  for (const BatchInput& input : inputs) {
    jobs.push_back({input.limits, input.keys, input.num_keys, input.row_splits, input.batch,
                    findings + jobs.size()});
  }
  LaunchJobs(stream, jobs);
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
