// Admission and eviction of device tables: what they know, and what they have removed. All but
// statistics of keys and setting the step wait for the device.
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/policy_outputs.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

class DeviceTableEvictOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    Tensor* evicted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &evicted));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     evicted->scalar<int64_t>()() = t.Evict(stream);
                   }));
  }
};

class DeviceTablePopEvictedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    EvictedRows popped;
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream) {
                     popped = t.PopEvicted();
                   }));
    OP_REQUIRES_OK(ctx, WriteEvictedRows(ctx, popped, table->options().dim));
  }
};

class DeviceTableStatisticsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    PolicyStatistics statistics;
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     statistics = t.Statistics(stream);
                   }));
    OP_REQUIRES_OK(ctx, WriteStatistics(ctx, statistics));
  }
};

class DeviceTableKeyStatisticsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    Tensor *present, *frequencies, *last_steps;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &present));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, keys.shape(), &frequencies));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, keys.shape(), &last_steps));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     t.KeyStatistics(stream, Keys(keys), keys.NumElements(),
                                     reinterpret_cast<uint8_t*>(present->flat<bool>().data()),
                                     frequencies->flat<int64_t>().data(),
                                     last_steps->flat<int64_t>().data());
                   }));
  }
};

class DeviceTableAssignScoresOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor &keys = ctx->input(1), &scores = ctx->input(2);
    OP_REQUIRES(ctx, keys.NumElements() == scores.NumElements(),
                absl::InvalidArgumentError("scores must be one a key"));
    Tensor* assigned;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &assigned));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     assigned->scalar<int64_t>()() = t.AssignScores(
                         stream, Keys(keys), keys.NumElements(), scores.flat<int64_t>().data());
                   }));
  }
};

class DeviceTableSetStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    OP_REQUIRES(ctx, tensorflow::TensorShapeUtils::IsScalar(ctx->input(1).shape()),
                absl::InvalidArgumentError("step must be a scalar"));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream) {
                     t.SetStep(ctx->input(1).scalar<int64_t>()());
                   }));
  }
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(Name("SokTableEvict").HostMemory("handle").HostMemory("num_evicted"),
                           DeviceTableEvictOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTablePopEvicted")
                               .HostMemory("handle")
                               .HostMemory("keys")
                               .HostMemory("rows")
                               .HostMemory("slot_rows")
                               .HostMemory("slot_names")
                               .HostMemory("slot_widths")
                               .HostMemory("frequencies")
                               .HostMemory("last_steps"),
                           DeviceTablePopEvictedOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableStatistics").HostMemory("handle").HostMemory("statistics"),
                           DeviceTableStatisticsOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableKeyStatistics").HostMemory("handle"),
                           DeviceTableKeyStatisticsOp);
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokTableAssignScores").HostMemory("handle").HostMemory("num_assigned"),
    DeviceTableAssignScoresOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableSetStep").HostMemory("handle").HostMemory("step"),
                           DeviceTableSetStepOp);

}  // namespace sok
