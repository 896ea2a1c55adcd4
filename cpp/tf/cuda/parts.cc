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
    std::vector<cuda::Move<float>> moves;
    for (const Piece& piece : pieces) moves.push_back({piece.from, to + piece.to, piece.count});
    cuda::MoveSegments(stream, workspace, moves);
    if (heads.empty()) return;
    const std::vector<int64_t> words(1, more_rounds);  // whose first half are the number's bits
    const auto* const number =
        reinterpret_cast<const float*>(cuda::Upload(stream, workspace, words));
    moves.clear();
    for (const int64_t head : heads) moves.push_back({number, to + head + kRoundsWord, 1});
    cuda::MoveSegments(stream, workspace, moves);
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
