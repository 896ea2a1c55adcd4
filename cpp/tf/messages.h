// What the ops at both ends of an exchange share: checks of a message, and failed messages.
#ifndef SOK_TF_MESSAGES_H_
#define SOK_TF_MESSAGES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "cpp/core/cpu/message.h"
#include "cpp/tf/calls.h"
#include "cpp/tf/common.h"

namespace sok {

// Checks the size of a block, `words` of `word_size` bytes: it is counted in int32, in words of 4
// bytes. SOK_BLOCK_LIMIT lowers the bound, for tests.
absl::Status BlockFits(int64_t words, size_t word_size);

// MPI counts the words sent and the words received in an all-to-all in int32. So in one round each
// of `world_size` blocks may have an equal share of that, and neither sum exceeds it.
// SOK_EXCHANGE_LIMIT lowers the bound, for tests.
int64_t WordsOfRound(int64_t world_size);

// Shape function: outputs 0 and 1 are a message and its splits.
absl::Status SetMessageShapes(InferenceContext* c);

// Checks that `splits` holds `world_size` lengths that add up to the message's.
absl::Status CheckSplits(const Tensor& message, const Tensor& splits, int64_t world_size);

// Runs `fn`, which reads a message that may carry a rank's failure. That failure is about the
// rank's input, not an internal fault of this process: InvalidArgument.
absl::Status RaisedByRank(const std::function<void()>& fn);
absl::Status RaisedByRank(const absl::Status& status);  // of such a function

// Of a key message: [world_size][num_tables].
using Segments = std::vector<std::vector<KeySegment>>;

// Cuts a received key message into segments; raises a failure that it carries.
absl::Status ParseKeys(const tensorflow::Tensor& message, const tensorflow::Tensor& splits,
                       int64_t world_size, int64_t num_tables, Segments* segments);

// Continues counting from the calls of a message's blocks, after they were found to differ.
template <typename T>
void CatchUpWith(const T* message, const int32_t* splits, int64_t world_size) {
  for (int64_t r = 0; r < world_size; message += splits[r], ++r) {
    if (splits[r] >= kHeadWords<T>) CatchUp(ReadHead(message));
  }
}

// Part of the failure of a rank that has a number too large for the wire.
inline constexpr char kUnfitForWire[] = "must hold numbers between";

// Raises the failure that a message carries, or that ranks are in different calls; after that they
// number their calls alike. In a row message, the failure is a table that cannot take keys
// (ResourceExhausted) or a row that does not fit the wire.
template <typename T>
absl::Status RaiseFailure(const T* message, const int32_t* splits, int64_t world_size) {
  const absl::Status status = RaisedByRank([&] { ThrowIfFailed(message, splits, world_size); });
  if (absl::IsFailedPrecondition(status)) {
    CatchUpWith(message, splits, world_size);
  } else if (!status.ok() && ReadHead(message).stage() == Stage::kRows &&
             !absl::StrContains(status.message(), kUnfitForWire)) {
    return absl::ResourceExhaustedError(status.message());
  }
  return status;
}

// Cuts a key message, which carries no failure and may lie in device memory, by its heads: the head
// and one word per table of each rank's block, [world_size, kHeadWords + num_tables].
absl::Status CutByHeads(const Tensor& heads, const Tensor& message, const Tensor& splits,
                        int64_t world_size, int64_t num_tables, Segments* segments);

// Checks a message as SokCheckMessage does, and sets its outputs: the call, and how many rounds
// follow. After ranks were found in different calls, they number their calls alike.
absl::Status SetCall(tensorflow::OpKernelContext* ctx, const float* message, const int32_t* splits,
                     int64_t world_size);

// The call that the input `call` [8] holds.
absl::Status GetCall(tensorflow::OpKernelContext* ctx, Call* call);

// The first text of the list input `problems` that is not empty, as a failure of this rank.
absl::Status FirstProblem(OpKernelContext* ctx);

// A message and its splits, for outputs 0 and 1. They become outputs when the message is complete:
// an op that fails before sends a failed message instead.
struct OutputMessage {
  Tensor message, splits;

  // words [world_size] of each rank's block, checked against what a block may hold.
  absl::Status Allocate(OpKernelContext* ctx, const std::vector<int64_t>& words);
  void Set(OpKernelContext* ctx) const;
};

// Sets outputs 0 and 1, a message and its splits, to the same failed block for every rank.
template <typename T>
absl::Status FailAll(tensorflow::OpKernelContext* ctx, const absl::Status& status, const Call& call,
                     int64_t world_size) {
  const std::vector<T> block = FailedBlock<T>(std::string(status.message()), call);
  tensorflow::Tensor *message, *splits;
  TF_RETURN_IF_ERROR(ctx->allocate_output(
      0, TensorShape({world_size * static_cast<int64_t>(block.size())}), &message));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({world_size}), &splits));
  for (int64_t r = 0; r < world_size; ++r) {
    std::copy(block.begin(), block.end(), message->flat<T>().data() + r * block.size());
    splits->flat<int32_t>()(r) = block.size();
  }
  return absl::OkStatus();
}

// Kernels with the attribute `world_size`; GradientOp also has `dims` and `scale`.
class RankOp : public OpKernel {
 public:
  explicit RankOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_size_));
  }

 protected:
  int64_t world_size_;
};

class GradientOp : public RankOp {
 public:
  explicit GradientOp(OpKernelConstruction* ctx) : RankOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale_));
  }

 protected:
  std::vector<int64_t> dims_;
  float scale_;
};

// A kernel of SokStampCall.
class StampOp : public OpKernel {
 public:
  explicit StampOp(OpKernelConstruction* ctx);

 protected:
  Call Next() const { return NextCall(lookup_, line_, static_cast<Stage>(stage_), wire_); }

 private:
  std::string lookup_;
  int64_t line_, stage_;
  Wire wire_;
};

}  // namespace sok

#endif  // SOK_TF_MESSAGES_H_
