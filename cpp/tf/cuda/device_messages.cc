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

std::vector<std::vector<KeySegment>> ParseDeviceKeyMessage(
    cuda::Stream stream, cuda::Workspace& workspace, const tensorflow::Tensor& message,
    const tensorflow::Tensor& splits, int64_t world_size, int64_t num_tables, Call* call) {
  const int64_t num_words = kHeadWords<int64_t> + num_tables;
  const std::vector<int64_t> words =
      CheckedHeads<int64_t>(stream, workspace, message, splits, world_size, num_words);
  std::vector<const int64_t*> heads;
  for (int64_t r = 0; r < world_size; ++r) heads.push_back(words.data() + r * num_words);
  if (call != nullptr) *call = ReadHead(words.data());
  return CutKeyMessage(heads, message.flat<int64_t>().data(), splits.flat<int32_t>().data(),
                       num_tables);
}

}  // namespace sok
