#include "cpp/tf/cuda/device_messages.h"

namespace sok {

absl::Status TryWithWorkspace(
    OpKernelContext* ctx, const std::function<absl::Status(cuda::Workspace&, cuda::Stream)>& fn) {
  absl::Status status;
  TF_RETURN_IF_ERROR(WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
    status = fn(workspace, stream);
  }));
  return status;
}

std::vector<const int64_t*> RowStarts(cuda::Workspace& workspace, const RowLayout& layout,
                                      cuda::SegmentList* list) {
  std::vector<const int64_t*> of_table;
  for (int i = 0; i < layout.num_tables(); ++i) {
    int64_t* offsets = workspace.Take<int64_t>(layout.num_rows(i));
    of_table.push_back(offsets);
    for (int64_t r = 0; r < layout.world_size(); ++r) {
      list->WriteOffsets(layout.count(r, i), layout.start(r, i), layout.dim(i), offsets);
      offsets += layout.count(r, i);
    }
  }
  return of_table;
}

void WriteHeads(const Call& call, const RowLayout& layout, float* message,
                cuda::SegmentList* list) {
  const int64_t head = list->Keep(call.words.data(), Call::kNumWords);
  for (int64_t r = 0; r < layout.world_size(); ++r) {
    list->MoveKept(head, message + layout.head(r), kHeadWords<float>);
  }
}

}  // namespace sok
