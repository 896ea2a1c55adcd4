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

std::vector<std::vector<KeySegment>> ParseDeviceKeyMessage(cuda::Stream stream,
                                                           cuda::Workspace& workspace,
                                                           const Tensor& message,
                                                           const Tensor& splits, int64_t world_size,
                                                           int64_t num_tables) {
  const int64_t num_words = 1 + num_tables;
  const std::vector<int64_t> words =
      CheckedHeads<int64_t>(stream, workspace, message, splits, world_size, num_words);
  std::vector<const int64_t*> heads;
  for (int64_t r = 0; r < world_size; ++r) heads.push_back(words.data() + r * num_words);
  return CutKeyMessage(heads, message.flat<int64_t>().data(), splits.flat<int32_t>().data(),
                       num_tables);
}

}  // namespace sok
