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

void WriteHeadsOnDevice(cuda::Stream stream, cuda::Workspace& workspace, const Call& call,
                        const std::vector<float*>& blocks) {
  const std::vector<int64_t> words(call.words.begin(), call.words.end());
  const auto* const head = reinterpret_cast<const float*>(cuda::Upload(stream, workspace, words));
  std::vector<cuda::Move<float>> moves;
  for (float* const block : blocks) moves.push_back({head, block, kHeadWords<float>});
  cuda::MoveSegments(stream, workspace, moves);
}

}  // namespace sok
