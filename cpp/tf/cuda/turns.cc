// SokStampCall and SokCheckMessage for a message in device memory.
#include "cpp/tf/cuda/device_messages.h"

namespace sok {

class DeviceStampCallOp : public StampOp {
 public:
  using StampOp::StampOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    const Call call = Next();
    Tensor* stamped;
    int forwarded = -1;
    OP_REQUIRES_OK(
        ctx, ctx->forward_input_or_allocate_output({0}, 0, message.shape(), &stamped, &forwarded));
    OP_REQUIRES_OK(
        ctx, Guard([&] {
          if (forwarded < 0) {
            cuda::CopyOnDevice(StreamOf(ctx), stamped->data(), message.data(),
                               message.TotalBytes());
          }
          // The first word stays: a failed block stays failed.
          std::vector<int64_t> targets;
          int64_t block = 0;
          for (int64_t r = 0; r < splits.NumElements(); ++r) {
            targets.push_back(block + 1);
            block += splits.flat<int32_t>()(r);
          }
          const auto* const stamp = reinterpret_cast<const uint64_t*>(call.words.data() + 1);
          cuda::StoreInBlocks(StreamOf(ctx), stamp, Call::kNumWords - 1, targets, Keys(stamped));
        }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(Name("SokStampCall").HostMemory("splits"), DeviceStampCallOp);

class DeviceCheckMessageOp : public RankOp {
 public:
  using RankOp::RankOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    const float* const words = message.flat<float>().data();
    const int32_t* const lengths = splits.flat<int32_t>().data();
    constexpr int64_t kHead = kHeadWords<float>;
    std::vector<float> heads;
    OP_REQUIRES_OK(ctx, Guard([&] {
                     heads = cuda::Heads(StreamOf(ctx), words, lengths, world_size_, kHead);
                   }));
    if (AllGood(heads, lengths, world_size_)) {
      const std::vector<int32_t> of_heads(world_size_, kHead);
      OP_REQUIRES_OK(ctx, SetCall(ctx, heads.data(), of_heads.data(), world_size_));
      return;
    }
    std::vector<float> whole(message.NumElements());
    OP_REQUIRES_OK(ctx, Guard([&] {
                     cuda::CopyToHost(StreamOf(ctx), whole.data(), words, message.TotalBytes());
                   }));
    OP_REQUIRES_OK(ctx, SetCall(ctx, whole.data(), lengths, world_size_));
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokCheckMessage").HostMemory("splits").HostMemory("call").HostMemory("more_rounds"),
    DeviceCheckMessageOp);

}  // namespace sok
