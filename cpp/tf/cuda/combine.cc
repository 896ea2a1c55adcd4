// SokCombine and SokCombineGrad on the device. Rows are read where they lie in the received
// message, and gradients are written to their places in the message to be sent.
#include "cpp/core/cuda/lookup/combine.h"

#include "cpp/tf/cuda/device_messages.h"
#include "cpp/tf/row_layout.h"
#include "cpp/tf/samples.h"

namespace sok {

class DeviceCombineOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1), &counts = ctx->input(2);
    std::vector<Samples> samples;
    std::vector<float*> out;
    OP_REQUIRES_OK(ctx, features_.GetSamples(ctx, &samples));
    const RowLayout layout(counts, features_.dims());
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, layout.world_size()));
    OP_REQUIRES_OK(ctx, layout.Check(message));
    OP_REQUIRES_OK(ctx, features_.MakeEmbeddings(ctx, samples, &out));
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     const auto starts =
                         RowStarts(ws, stream, layout, ctx->input(ctx->num_inputs() - 1));
                     std::vector<cuda::ScatteredCombineBatch> batches;
                     for (int i = 0; i < features_.size(); ++i) {
                       batches.push_back({samples[i], message.flat<float>().data(), starts[i],
                                          features_.dim(i), out[i], layout.IsAligned(i)});
                     }
                     cuda::CombineRows(stream, batches);
                   }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokCombine").HostMemory("splits").HostMemory("counts").HostMemory("call"),
    DeviceCombineOp);

class DeviceCombineGradOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads;
    std::vector<Samples> samples;
    OP_REQUIRES_OK(ctx, features_.GetGradients(ctx, &samples, &grads));
    const RowLayout layout(ctx->input(features_.size()), features_.dims());
    Tensor* message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({layout.num_words()}), &message));
    float* const words = message->flat<float>().data();
    Call call;
    OP_REQUIRES_OK(ctx, GetCall(ctx, &call));
    call = call.At(Stage::kGradients);
    OP_REQUIRES_OK(
        ctx, WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
          WriteHeads(call, layout, words, stream);
          const auto starts = RowStarts(ws, stream, layout, ctx->input(ctx->num_inputs() - 1));
          std::vector<cuda::ScatteredGradientBatch> batches;
          for (int i = 0; i < features_.size(); ++i) {
            batches.push_back({samples[i], grads[i].flat<float>().data(), layout.num_rows(i),
                               features_.dim(i), starts[i], words, layout.IsAligned(i)});
          }
          cuda::CombineGradient(stream, ws, batches);  // every row: each has a position
        }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(Name("SokCombineGrad").HostMemory("counts").HostMemory("call"),
                           DeviceCombineGradOp);

}  // namespace sok
