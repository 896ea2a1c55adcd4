// Ops on one table as a whole: its size and statistics, clear and erase.
#include <algorithm>

#include "cpp/tf/common.h"

namespace sok {

REGISTER_OP("SokSetSeed")
    .Input("seed: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Sets the seed that tables created from now on draw their initial rows from.");

class SetSeedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    SetProcessSeed(static_cast<uint64_t>(ctx->input(0).scalar<int64_t>()()));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokSetSeed").Device(tensorflow::DEVICE_CPU), SetSeedOp);

REGISTER_OP("SokTableSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetShapeFn(ScalarShape)
    .Doc("Keys held by this rank's shard.");

class TableSizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tensor* size;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &size));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     size->scalar<int64_t>()() = table.Size(context);
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableSize").HostMemory("handle").HostMemory("size"),
                          TableSizeOp);

REGISTER_OP("SokTableStats")
    .Input("handle: resource")
    .Output("stats: double")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(15));
      return absl::OkStatus();
    })
    .Doc(
        "size, capacity, max_capacity, num_buckets, load_factor, mean_probe_length, "
        "max_probe_length, index_bytes, arena_bytes, bytes, and of rows on disk resident_bytes, "
        "file_bytes, bytes_read, bytes_written, blocks_evicted of this rank's shard.");

class TableStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    MemoryStats s;
    OP_REQUIRES_OK(
        ctx, WithTable(ctx, [&](Table& table, CallContext context) { s = table.Stats(context); }));
    const std::vector<double> values = {double(s.size),
                                        double(s.capacity),
                                        double(s.max_capacity),
                                        double(s.num_buckets),
                                        s.load_factor,
                                        s.mean_probe_length,
                                        double(s.max_probe_length),
                                        double(s.index_bytes),
                                        double(s.arena_bytes),
                                        double(s.bytes),
                                        double(s.storage.resident_bytes),
                                        double(s.storage.file_bytes),
                                        double(s.storage.bytes_read),
                                        double(s.storage.bytes_written),
                                        double(s.storage.blocks_evicted)};
    Tensor* stats;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({int64_t(values.size())}), &stats));
    std::copy(values.begin(), values.end(), stats->flat<double>().data());
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableStats").HostMemory("handle").HostMemory("stats"),
                          TableStatsOp);

REGISTER_OP("SokTableClear")
    .Input("handle: resource")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Removes every key; a key that comes back starts from its initial row.");

class TableClearOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx,
                   WithTable(ctx, [](Table& table, CallContext context) { table.Clear(context); }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableClear").HostMemory("handle"), TableClearOp);

REGISTER_OP("SokTableErase")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("num_erased: int64")
    .SetShapeFn(ScalarShape)
    .Doc("Removes keys [num_keys]; absent ones are ignored.");

class TableEraseOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(1);
    Tensor* erased;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &erased));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     erased->scalar<int64_t>()() =
                         table.Erase(context, Keys(keys), keys.NumElements());
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableErase").HostMemory("handle").HostMemory("num_erased"),
                          TableEraseOp);

}  // namespace sok
