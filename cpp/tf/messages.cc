#include "cpp/tf/messages.h"

#include <limits>

#include "absl/strings/str_cat.h"

namespace sok {

absl::Status SplitsFit(int64_t words) {
  if (words <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a message to one rank must stay below 2^31 words. Received: ", words,
                   "; use a smaller batch"));
}

absl::Status CheckSplits(const Tensor& message, const Tensor& splits, int64_t world_size) {
  int64_t total = 0;
  for (int64_t r = 0; r < splits.NumElements(); ++r) total += splits.flat<int32_t>()(r);
  if (splits.NumElements() == world_size && total == message.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "splits must hold ", world_size, " lengths that add up to the message's ",
      message.NumElements(), ". Received: ", splits.NumElements(), " adding up to ", total));
}

absl::Status RaisedByRank(const std::function<void()>& fn) { return RaisedByRank(Guard(fn)); }

absl::Status RaisedByRank(const absl::Status& status) {
  if (absl::IsInternal(status)) return absl::InvalidArgumentError(status.message());
  return status;
}

absl::Status CheckGradWords(int64_t rank, int64_t required, int64_t received) {
  if (required == received) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the gradients of rank ", rank, " must hold ", required,
                   " words, one row a key it asked for. Received: ", received));
}

absl::Status FirstProblem(OpKernelContext* ctx) {
  OpInputList problems;
  TF_RETURN_IF_ERROR(ctx->input_list("problems", &problems));
  for (const Tensor& problem : problems) {
    const tensorflow::tstring& text = problem.scalar<tensorflow::tstring>()();
    if (!text.empty()) return absl::InvalidArgumentError(std::string(text));
  }
  return absl::OkStatus();
}

}  // namespace sok
