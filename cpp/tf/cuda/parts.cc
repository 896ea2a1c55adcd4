// SokTakePart and SokJoinParts for a message in device memory.
#include "cpp/tf/parts.h"

#include "cpp/tf/cuda/device_messages.h"

namespace sok {
namespace {

absl::Status WriteOnDevice(OpKernelContext* ctx, const std::vector<Piece>& pieces,
                           const std::vector<int64_t>& heads, int32_t more_rounds,
                           Tensor* message) {
  return WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
    float* const to = message->flat<float>().data();
    cuda::SegmentList list;
    for (const Piece& piece : pieces) list.Move(piece.from, to + piece.to, piece.count);
    list.Run(stream, workspace);
    if (heads.empty()) return;
    cuda::SegmentList rounds;            // over words that were moved
    const int64_t number = more_rounds;  // its first half are the number's bits
    const int64_t kept = rounds.Keep(&number, 1);
    for (const int64_t head : heads) rounds.MoveKept(kept, to + head + kRoundsWord, 1);
    rounds.Run(stream, workspace);
  });
}

absl::Status TakeDevicePart(OpKernelContext* ctx) { return TakePart(ctx, WriteOnDevice); }
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokTakePart").HostMemory("splits").HostMemory("round").HostMemory("part_splits"),
    FunctionOp<TakeDevicePart>);

absl::Status JoinDeviceParts(OpKernelContext* ctx) { return JoinParts(ctx, WriteOnDevice); }
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokJoinParts").HostMemory("splits").HostMemory("part_splits").HostMemory("joined_splits"),
    FunctionOp<JoinDeviceParts>);

}  // namespace
}  // namespace sok
