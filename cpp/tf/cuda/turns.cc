// SokStampCall and SokCheckMessage for a message in device memory.
#include "cpp/tf/cuda/device_messages.h"

namespace sok {

class DeviceStampCallOp : public OpKernel {
 public:
  explicit DeviceStampCallOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("lookup", &lookup_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("stage", &stage_));
    OP_REQUIRES_OK(ctx, GetWire(ctx, &wire_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    const Call call = NextCall(lookup_, static_cast<Stage>(stage_), wire_);
    ctx->set_output(0, message);  // only the words that name the call change
    int64_t* block = const_cast<int64_t*>(message.flat<int64_t>().data());
    OP_REQUIRES_OK(ctx, Guard([&] {
                     for (int64_t r = 0; r < splits.NumElements(); ++r) {
                       // The first word stays: a failed block stays failed.
                       cuda::UploadWords(StreamOf(ctx), call.words.data() + 1, Call::kNumWords - 1,
                                         reinterpret_cast<uint64_t*>(block + 1));
                       block += splits.flat<int32_t>()(r);
                     }
                   }));
  }

 private:
  std::string lookup_;
  int64_t stage_;
  Wire wire_;
};
SOK_REGISTER_DEVICE_KERNEL(Name("SokStampCall").HostMemory("splits"), DeviceStampCallOp);

class DeviceCheckMessageOp : public RankOp {
 public:
  using RankOp::RankOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    constexpr int64_t kHead = kHeadWords<float>;
    std::vector<float> heads;
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     heads = cuda::Heads(stream, ws, message.flat<float>().data(),
                                         splits.flat<int32_t>().data(), world_size_, kHead);
                   }));
    std::vector<int32_t> lengths(splits.flat<int32_t>().data(),
                                 splits.flat<int32_t>().data() + world_size_);
    if (AllGood(heads, lengths)) {
      const std::vector<int32_t> of_heads(world_size_, kHead);
      const int32_t more_rounds = MoreRounds(heads.data(), of_heads.data(), world_size_);
      OP_REQUIRES_OK(ctx, SetCall(ctx, ReadHead(heads.data()), more_rounds));
      return;
    }
    std::vector<float> whole(message.NumElements());
    OP_REQUIRES_OK(ctx, Guard([&] {
                     cuda::CopyToHost(StreamOf(ctx), whole.data(), message.data(),
                                      message.TotalBytes());
                   }));
    OP_REQUIRES_OK(ctx, RaiseOutOfStep(whole.data(), lengths.data(), world_size_));
    const int32_t more_rounds = MoreRounds(whole.data(), lengths.data(), world_size_);
    if (more_rounds == 0) {
      OP_REQUIRES_OK(ctx, RaiseFailure(whole.data(), lengths.data(), world_size_));
    }
    OP_REQUIRES_OK(ctx, SetCall(ctx, ReadHead(whole.data()), more_rounds));
  }

 private:
  bool AllGood(const std::vector<float>& heads, const std::vector<int32_t>& lengths) const {
    const Call first = ReadHead(heads.data());
    for (int64_t r = 0; r < world_size_; ++r) {
      if (lengths[r] < kHeadWords<float>) return false;
      const Call call = ReadHead(&heads[r * kHeadWords<float>]);
      const bool failed = static_cast<uint32_t>(call.words[0]) != 0;
      if (failed || call.At(call.stage()).words != first.At(first.stage()).words) return false;
    }
    return true;
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokCheckMessage").HostMemory("splits").HostMemory("call").HostMemory("more_rounds"),
    DeviceCheckMessageOp);

}  // namespace sok
