// Device tables as a whole: handle, size and statistics, clear and erase. All but making the table
// wait for the device.
#include "cpp/core/cuda/table.h"

#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/table_handle.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

SOK_REGISTER_DEVICE_KERNEL(Name("SokTableHandle").HostMemory("handle"),
                           TableHandleOp<DeviceTableResource>);

namespace {

class DeviceTableSizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    Tensor* size;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &size));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     size->scalar<int64_t>()() = t.Size(stream);
                   }));
  }
};

class DeviceTableStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    cuda::DeviceTableStats s;
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     s = t.Stats(stream);
                   }));
    const std::vector<double> values = {double(s.size),
                                        double(s.capacity),
                                        double(s.max_capacity),
                                        double(s.num_buckets),
                                        s.load_factor,
                                        s.mean_probe_length,
                                        double(s.max_probe_length),
                                        double(s.index_bytes),
                                        double(s.arena_bytes),
                                        double(s.bytes)};
    Tensor* stats;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({int64_t(values.size())}), &stats));
    std::copy(values.begin(), values.end(), stats->flat<double>().data());
  }
};

class DeviceTableClearOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [](cuda::CudaTable& t, cuda::Stream stream) {
                     t.Clear(stream);
                   }));
  }
};

class DeviceTableEraseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    Tensor* erased;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &erased));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     erased->scalar<int64_t>()() = t.Erase(stream, Keys(keys), keys.NumElements());
                   }));
  }
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(Name("SokTableSize").HostMemory("handle").HostMemory("size"),
                           DeviceTableSizeOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableStats").HostMemory("handle").HostMemory("stats"),
                           DeviceTableStatsOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableClear").HostMemory("handle"), DeviceTableClearOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableErase").HostMemory("handle").HostMemory("num_erased"),
                           DeviceTableEraseOp);

}  // namespace sok
