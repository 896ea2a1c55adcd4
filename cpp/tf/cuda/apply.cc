// One optimizer step on the rows of a batch, of as many device tables as take it alike.
#include "cpp/core/cuda/update/apply.h"

#include <vector>

#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/optimizer_attrs.h"

namespace sok {

namespace {

class DeviceApplyGradientsOp : public OpKernel {
 public:
  explicit DeviceApplyGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadOptimizer(ctx, &options_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keys_are_unique", &keys_are_unique_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<DeviceTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, grads;
    OP_REQUIRES_OK(ctx, GetLists(ctx, {{"keys", &keys}, {"grads", &grads}}));
    const int n = keys.size();
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckRowsShape("gradients", keys[i], grads[i], tables[i]->options()));
    }
    const float learning_rate = ctx->input(3 * n).scalar<float>()();
    const int64_t step = ctx->input(3 * n + 1).scalar<int64_t>()();
    OP_REQUIRES_OK(ctx, WithTables(ctx, tables, [&](cuda::Stream stream) {
                     std::vector<cuda::TableGradients> batches;
                     for (int i = 0; i < n; ++i) {
                       batches.push_back({&tables[i]->table(), Keys(keys[i]),
                                          grads[i].flat<float>().data(), keys[i].NumElements()});
                     }
                     cuda::ApplyGradients(stream, batches, options_, learning_rate, step,
                                          keys_are_unique_);
                   }));
  }

 private:
  OptimizerOptions options_;
  bool keys_are_unique_;
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(
    Name("SokApplyGradients").HostMemory("handles").HostMemory("learning_rate").HostMemory("step"),
    DeviceApplyGradientsOp);

}  // namespace sok
