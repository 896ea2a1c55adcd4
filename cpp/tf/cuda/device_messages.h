// Messages of an exchange in device memory. Their layout and their failures are those of
// cpu/message.h; lengths (splits) are in host memory, where Horovod wants them.
#ifndef SOK_TF_CUDA_DEVICE_MESSAGES_H_
#define SOK_TF_CUDA_DEVICE_MESSAGES_H_

#include <functional>
#include <string>
#include <vector>

#include "cpp/core/cuda/lookup/segments.h"
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/row_layout.h"

namespace sok {

// WithWorkspace for functions that may also return a Status.
absl::Status TryWithWorkspace(
    OpKernelContext* ctx, const std::function<absl::Status(cuda::Workspace&, cuda::Stream)>& fn);

// Whether no block carries a failure and all are of one call. `heads`: the first words of each
// rank's block, a head and maybe more.
template <typename T>
bool AllGood(const std::vector<T>& heads, const int32_t* lengths, int64_t world_size) {
  const int64_t num_words = heads.size() / world_size;
  const Call first = ReadHead(heads.data());
  for (int64_t r = 0; r < world_size; ++r) {
    if (lengths[r] < kHeadWords<T>) return false;
    const Call call = ReadHead(&heads[r * num_words]);
    const bool failed = static_cast<uint32_t>(call.words[0]) != 0;
    if (failed || call.At(call.stage()).words != first.At(first.stage()).words) return false;
  }
  return true;
}

// Where the rows of table i will begin in a message once `list` has run, as words counted from its
// begin: those of all ranks, one rank after the other. `starts` [layout.num_rows(i)].
void WriteRowStarts(const RowLayout& layout, int i, int64_t* starts, cuda::SegmentList* list);

// The same of each table, from the output `starts` of SokRoute. Where SokRoute ran on the host, from
// a launch, in memory of the workspace.
std::vector<const int64_t*> RowStarts(cuda::Workspace& workspace, cuda::Stream stream,
                                      const RowLayout& layout, const Tensor& starts);

// WriteHead for all blocks of a row message in device memory: once `list` has run, or in a launch.
void WriteHeads(const Call& call, const RowLayout& layout, float* message, cuda::SegmentList* list);
void WriteHeads(const Call& call, const RowLayout& layout, float* message, cuda::Stream stream);

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
