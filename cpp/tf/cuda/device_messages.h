// Messages of an exchange in device memory. Their layout and their failures are those of
// cpu/message.h; lengths (splits) are in host memory, where Horovod wants them.
#ifndef SOK_TF_CUDA_DEVICE_MESSAGES_H_
#define SOK_TF_CUDA_DEVICE_MESSAGES_H_

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cpp/core/cuda/lookup/segments.h"
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/messages.h"

namespace sok {

// WithWorkspace for functions that may also return a Status.
absl::Status TryWithWorkspace(
    OpKernelContext* ctx, const std::function<absl::Status(cuda::Workspace&, cuda::Stream)>& fn);

// The first `num_words` words of each rank's block, a head and more, on the host, padded with
// zeros. Throws what ThrowIfFailed does. Waits, once unless it throws.
template <typename T>
std::vector<T> CheckedHeads(cuda::Stream stream, cuda::Workspace& workspace, const Tensor& message,
                            const Tensor& splits, int64_t world_size, int64_t num_words) {
  const T* const words = message.flat<T>().data();
  const int32_t* const lengths = splits.flat<int32_t>().data();
  std::vector<T> heads = cuda::Heads(stream, workspace, words, lengths, world_size, num_words);
  bool all_good = true;
  for (int64_t r = 0; r < world_size && all_good; ++r) {
    all_good = lengths[r] >= kHeadWords<T>;
    if (!all_good) break;
    const Call call = ReadHead(&heads[r * num_words]);
    all_good = call.words[0] == 0 && call.words == ReadHead(heads.data()).words;
  }
  if (!all_good) {
    std::vector<T> whole(message.NumElements());
    cuda::CopyToHost(stream, whole.data(), words, whole.size() * sizeof(T));
    ThrowIfFailed(whole.data(), lengths, world_size);
  }
  return heads;
}

// WriteHead for blocks in device memory. Does not wait.
void WriteHeadsOnDevice(cuda::Stream stream, cuda::Workspace& workspace, const Call& call,
                        const std::vector<float*>& blocks);

// FailAll (messages.h) for a message in device memory.
template <typename T>
absl::Status FailAllOnDevice(tensorflow::OpKernelContext* ctx, const absl::Status& status,
                             const Call& call, int64_t world_size) {
  const std::vector<T> block = FailedBlock<T>(std::string(status.message()), call);
  std::vector<T> blocks;
  for (int64_t r = 0; r < world_size; ++r) blocks.insert(blocks.end(), block.begin(), block.end());
  Tensor *message, *splits;
  const int64_t num_words = blocks.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({num_words}), &message));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({world_size}), &splits));
  for (int64_t r = 0; r < world_size; ++r) splits->flat<int32_t>()(r) = block.size();
  return Guard([&] {
    cuda::CopyToDevice(StreamOf(ctx), message->flat<T>().data(), blocks.data(),
                       num_words * sizeof(T));
  });
}

}  // namespace sok

#endif  // SOK_TF_CUDA_DEVICE_MESSAGES_H_
