// Keys of a training lookup that go to device tables with policies. As on the host, a table that
// several features (or ranks) name gets all its keys in one call.
#ifndef SOK_TF_CUDA_RECORDED_LOOKUP_KEYS_H_
#define SOK_TF_CUDA_RECORDED_LOOKUP_KEYS_H_

#include <algorithm>
#include <utility>
#include <vector>

#include "cpp/core/cuda/lookup/segments.h"
#include "cpp/tf/cuda/kernel.h"

namespace sok {

class RecordedLookupKeys {
 public:
  explicit RecordedLookupKeys(const std::vector<DeviceTablePtr>& tables) : tables_(tables) {}

  // `keys` are distinct and in device memory, and must stay there until Record returns.
  void Add(int64_t feature, const uint64_t* keys, int64_t num_keys) {
    DeviceTableResource* const table = tables_[feature].get();
    if (!table->options().policy.keeps_records()) return;
    auto it = std::find_if(batches_.begin(), batches_.end(),
                           [table](const Batch& batch) { return batch.table == table; });
    if (it == batches_.end()) it = batches_.insert(it, Batch{table, {}, 0});
    it->segments.push_back({keys, nullptr, num_keys});
    it->num_keys += num_keys;
  }

  // What RecordTrainingLookup throws becomes a Status.
  absl::Status Record(OpKernelContext* ctx) {
    for (Batch& batch : batches_) {
      TF_RETURN_IF_ERROR(Guard([&] {
        cuda::CudaTable& table = batch.table->table();
        const std::lock_guard<cuda::HeldMutex> lock(table.mutex());
        const cuda::Stream stream = StreamOf(ctx);
        if (batch.segments.size() == 1) {  // keys of one feature or rank are distinct
          const uint64_t* const distinct = batch.segments[0].from;
          return table.RecordTrainingLookup(stream, distinct, batch.num_keys, /*distinct=*/true);
        }
        cuda::Workspace& workspace = table.workspace();
        const cuda::Workspace::Scope scope(workspace, stream);
        uint64_t* const keys = workspace.Take<uint64_t>(batch.num_keys);
        uint64_t* to = keys;
        for (cuda::Move<uint64_t>& segment : batch.segments) {
          segment.to = to;
          to += segment.count;
        }
        cuda::MoveSegments(stream, workspace, batch.segments);
        table.RecordTrainingLookup(stream, keys, batch.num_keys);
      }));
    }
    return absl::OkStatus();
  }

 private:
  struct Batch {
    DeviceTableResource* table;
    std::vector<cuda::Move<uint64_t>> segments;
    int64_t num_keys;
  };
  const std::vector<DeviceTablePtr>& tables_;
  std::vector<Batch> batches_;
};

}  // namespace sok

#endif  // SOK_TF_CUDA_RECORDED_LOOKUP_KEYS_H_
