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

void WriteRowStarts(const RowLayout& layout, int i, int64_t* starts, cuda::SegmentList* list) {
  for (int64_t r = 0; r < layout.world_size(); ++r) {
    list->WriteOffsets(layout.count(r, i), layout.start(r, i), layout.dim(i), starts);
    starts += layout.count(r, i);
  }
}

std::vector<const int64_t*> RowStarts(cuda::Workspace& workspace, cuda::Stream stream,
                                      const RowLayout& layout, const Tensor& starts) {
  const bool from_host = starts.NumElements() != layout.num_rows();
  int64_t* const memory = workspace.Take<int64_t>(from_host ? layout.num_rows() : 0);
  cuda::SegmentList list;
  std::vector<const int64_t*> of_table;
  int64_t first = 0;
  for (int i = 0; i < layout.num_tables(); ++i) {
    if (from_host) WriteRowStarts(layout, i, memory + first, &list);
    of_table.push_back((from_host ? memory : starts.flat<int64_t>().data()) + first);
    first += layout.num_rows(i);
  }
  list.Run(stream, workspace);
  return of_table;
}

void WriteHeads(const Call& call, const RowLayout& layout, float* message,
                cuda::SegmentList* list) {
  const int64_t head = list->Keep(call.words.data(), Call::kNumWords);
  for (int64_t r = 0; r < layout.world_size(); ++r) {
    list->MoveKept(head, message + layout.head(r), kHeadWords<float>);
  }
}

void WriteHeads(const Call& call, const RowLayout& layout, float* message, cuda::Stream stream) {
  float head[kHeadWords<float>];
  WriteHead(call, head);
  std::vector<int64_t> targets;
  for (int64_t r = 0; r < layout.world_size(); ++r) targets.push_back(layout.head(r));
  cuda::StoreInBlocks(stream, head, kHeadWords<float>, targets, message);
}

}  // namespace sok
