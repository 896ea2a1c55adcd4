// What the ops at both ends of an exchange share: checks of a message, and the failed one.
#ifndef SOK_TF_MESSAGES_H_
#define SOK_TF_MESSAGES_H_

#include <functional>
#include <string>
#include <vector>

#include "cpp/core/cpu/message.h"
#include "cpp/tf/common.h"

namespace sok {

// Lengths travel as int32.
absl::Status SplitsFit(int64_t words);

// `splits` holds `world_size` lengths that add up to the message's.
absl::Status CheckSplits(const Tensor& message, const Tensor& splits, int64_t world_size);

// Runs `fn`, which reads a message that may carry a rank's failure. That failure is about the
// rank's input, not an internal fault of this process: InvalidArgument.
absl::Status RaisedByRank(const std::function<void()>& fn);
absl::Status RaisedByRank(const absl::Status& status);  // of such a function

// The gradients that rank r sent, `received` words, are one row a key it asked for.
absl::Status CheckGradWords(int64_t rank, int64_t required, int64_t received);

// The first text of the list input `problems` that is not empty, as a failure of this rank.
absl::Status FirstProblem(OpKernelContext* ctx);

// Sets outputs 0 and 1, a message and its splits, to the same failed block for every rank.
template <typename T>
absl::Status FailAll(OpKernelContext* ctx, const absl::Status& status, int64_t world_size) {
  const std::vector<T> block = FailedBlock<T>(std::string(status.message()));
  Tensor *message, *splits;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      0, TensorShape({world_size * static_cast<int64_t>(block.size())}), &message));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({world_size}), &splits));
  for (int64_t r = 0; r < world_size; ++r) {
    std::copy(block.begin(), block.end(), message->flat<T>().data() + r * block.size());
    splits->flat<int32_t>()(r) = block.size();
  }
  return absl::OkStatus();
}

}  // namespace sok

#endif  // SOK_TF_MESSAGES_H_
