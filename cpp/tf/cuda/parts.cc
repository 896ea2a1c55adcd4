// SokTakePart and SokJoinParts where the message is in device memory.
#include "cpp/tf/parts.h"

#include "cpp/tf/cuda/device_messages.h"

namespace sok {

namespace {

void Append(const std::vector<Piece>& pieces, const Tensor& from, Tensor* to,
            std::vector<cuda::Move<float>>* moves) {
  for (const Piece& piece : pieces) {
    moves->push_back(
        {from.flat<float>().data() + piece.from, to->flat<float>().data() + piece.to, piece.count});
  }
}

void SetMoreRounds(cuda::Stream stream, cuda::Workspace& workspace,
                   const std::vector<int64_t>& starts, int32_t more_rounds, Tensor* message) {
  const std::vector<int64_t> words(1, more_rounds);  // whose first half are the bits of the number
  const auto* const number = reinterpret_cast<const float*>(cuda::Upload(stream, workspace, words));
  std::vector<cuda::Move<float>> moves;
  for (const int64_t start : starts) {
    moves.push_back({number, message->flat<float>().data() + start + kRoundsWord, 1});
  }
  cuda::MoveSegments(stream, workspace, moves);
}

}  // namespace

class DeviceTakePartOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    const int32_t round = ctx->input(2).scalar<int32_t>()();
    const Part part = PartOf(LengthsOf(splits), round);
    OP_REQUIRES_OK(ctx, SetLengths(ctx, part.lengths));
    if (part.num_words == message.NumElements()) {
      ctx->set_output(0, message);
      return;
    }
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({part.num_words}), &out));
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                     std::vector<cuda::Move<float>> moves;
                     Append(part.pieces, message, out, &moves);
                     cuda::MoveSegments(stream, workspace, moves);
                     if (round > 0) return;
                     SetMoreRounds(stream, workspace, part.starts, part.more_rounds, out);
                   }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokTakePart").HostMemory("splits").HostMemory("round").HostMemory("part_splits"),
    DeviceTakePartOp);

class DeviceJoinPartsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    const Tensor &part = ctx->input(2), &part_splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    OP_REQUIRES_OK(ctx, CheckSplits(part, part_splits, splits.NumElements()));
    const Joined joined = Join(LengthsOf(splits), LengthsOf(part_splits));
    OP_REQUIRES_OK(ctx, SetLengths(ctx, joined.lengths));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({joined.num_words}), &out));
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                     std::vector<cuda::Move<float>> moves;
                     Append(joined.of_blocks, message, out, &moves);
                     Append(joined.of_parts, part, out, &moves);
                     cuda::MoveSegments(stream, workspace, moves);
                     SetMoreRounds(stream, workspace, joined.starts, 0, out);
                   }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokJoinParts").HostMemory("splits").HostMemory("part_splits").HostMemory("joined_splits"),
    DeviceJoinPartsOp);

}  // namespace sok
