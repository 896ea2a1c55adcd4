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

std::vector<const int64_t*> RowStarts(cuda::Stream stream, cuda::Workspace& workspace,
                                      const RowLayout& layout) {
  std::vector<cuda::RowSegment> segments;
  std::vector<int64_t> first = {0};
  for (int i = 0; i < layout.num_tables(); ++i) {
    first.push_back(first.back() + layout.num_rows(i));
    for (int64_t r = 0; r < layout.world_size(); ++r) {
      segments.push_back({layout.count(r, i), layout.start(r, i), layout.dim(i)});
    }
  }
  int64_t* const offsets = workspace.Take<int64_t>(first.back());
  cuda::RowOffsets(stream, workspace, segments, offsets);
  std::vector<const int64_t*> of_table;
  for (int i = 0; i < layout.num_tables(); ++i) of_table.push_back(offsets + first[i]);
  return of_table;
}

void WriteHeadsOnDevice(cuda::Stream stream, cuda::Workspace& workspace, const Call& call,
                        const RowLayout& layout, float* message) {
  const std::vector<int64_t> words(call.words.begin(), call.words.end());
  const auto* const head = reinterpret_cast<const float*>(cuda::Upload(stream, workspace, words));
  std::vector<cuda::Move<float>> moves;
  for (int64_t r = 0; r < layout.world_size(); ++r) {
    moves.push_back({head, message + layout.head(r), kHeadWords<float>});
  }
  cuda::MoveSegments(stream, workspace, moves);
}

}  // namespace sok
