// SokCombine and SokCombineGrad on the device. Rows are read where they lie in the received
// message, and gradients are written to their places in the message to be sent.
#include "cpp/core/cuda/lookup/combine.h"

#include "cpp/tf/cuda/device_messages.h"
#include "cpp/tf/row_layout.h"

namespace sok {

namespace {

// The word at which each unique row of each table begins; tables one after the other.
std::vector<const int64_t*> RowStarts(cuda::Stream stream, cuda::Workspace& workspace,
                                      const RowLayout& layout, const FeatureAttrs& features) {
  std::vector<cuda::RowSegment> segments;
  std::vector<int64_t> first = {0};
  for (int i = 0; i < features.size(); ++i) {
    first.push_back(first.back() + layout.num_unique(i));
    for (int64_t r = 0; r < layout.world_size(); ++r) {
      segments.push_back({layout.count(r, i), layout.start(r, i), features.dim(i)});
    }
  }
  int64_t* const offsets = workspace.Take<int64_t>(first.back());
  cuda::RowOffsets(stream, workspace, segments, offsets);
  std::vector<const int64_t*> of_table;
  for (int i = 0; i < features.size(); ++i) of_table.push_back(offsets + first[i]);
  return of_table;
}

// Whether all rows of a table begin at a multiple of 16 bytes of the message.
bool IsAligned(const RowLayout& layout, int table, int64_t dim) {
  bool aligned = dim % 4 == 0;
  for (int64_t r = 0; r < layout.world_size(); ++r) aligned &= layout.start(r, table) % 4 == 0;
  return aligned;
}

}  // namespace

class DeviceCombineOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1), &counts = ctx->input(2);
    std::vector<Samples> samples;
    std::vector<float*> out;
    OP_REQUIRES_OK(ctx, features_.GetSamples(ctx, &samples));
    const RowLayout layout(counts, features_);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, layout.world_size()));
    OP_REQUIRES_OK(ctx, layout.Check(message));
    OP_REQUIRES_OK(ctx, features_.MakeEmbeddings(ctx, samples, &out));
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     const auto starts = RowStarts(stream, ws, layout, features_);
                     std::vector<cuda::ScatteredCombineBatch> batches;
                     for (int i = 0; i < features_.size(); ++i) {
                       const int64_t dim = features_.dim(i);
                       batches.push_back({samples[i], message.flat<float>().data(), starts[i], dim,
                                          out[i], IsAligned(layout, i, dim)});
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
    const RowLayout layout(ctx->input(features_.size()), features_);
    Tensor* message;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({layout.num_words()}), &message));
    float* const words = message->flat<float>().data();
    Call call;
    OP_REQUIRES_OK(ctx, GetCall(ctx, &call));
    call = call.At(Stage::kGradients);
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     cuda::FillWithZeros(stream, words, message->TotalBytes());
                     std::vector<float*> blocks;
                     for (int64_t r = 0; r < layout.world_size(); ++r) {
                       blocks.push_back(words + layout.start(r, 0) - kHeadWords<float>);
                     }
                     WriteHeadsOnDevice(stream, ws, call, blocks);
                     const auto starts = RowStarts(stream, ws, layout, features_);
                     std::vector<cuda::ScatteredGradientBatch> batches;
                     for (int i = 0; i < features_.size(); ++i) {
                       batches.push_back({samples[i], grads[i].flat<float>().data(),
                                          layout.num_unique(i), features_.dim(i), starts[i], words,
                                          IsAligned(layout, i, features_.dim(i))});
                     }
                     cuda::CombineGradient(stream, ws, batches);
                   }));
  }
};
SOK_REGISTER_DEVICE_KERNEL(Name("SokCombineGrad").HostMemory("counts").HostMemory("call"),
                           DeviceCombineGradOp);

}  // namespace sok
