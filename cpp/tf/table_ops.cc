// Ops on one table as a whole: its size and statistics, clear and erase.
#include <vector>

#include "cpp/tf/common.h"

namespace sok {
namespace {

using tensorflow::shape_inference::NoOutputs;

REGISTER_OP("SokSetSeed")
    .Input("seed: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("Sets the seed that tables created from now on draw their initial rows from.");

absl::Status SetSeed(OpKernelContext* ctx) {
  SetProcessSeed(static_cast<uint64_t>(ctx->input(0).scalar<int64_t>()()));
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokSetSeed").Device(tensorflow::DEVICE_CPU), FunctionOp<SetSeed>);

REGISTER_OP("SokTableSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetShapeFn(ScalarShape)
    .Doc("Keys held by this rank's shard.");

absl::Status Size(OpKernelContext* ctx) {
  return SetNumberOfTable(ctx,
                          [](Table& table, CallContext context) { return table.Size(context); });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableSize").HostMemory("handle").HostMemory("size"),
                          FunctionOp<Size>);

REGISTER_OP("SokTableStats")
    .Input("handle: resource")
    .Output("stats: double")
    .SetShapeFn([](InferenceContext* c) { return SetShapes(c, {{15}}); })
    .Doc(
        "size, capacity, max_capacity, num_buckets, load_factor, mean_probe_length, "
        "max_probe_length, index_bytes, arena_bytes, bytes, and of rows on disk resident_bytes, "
        "file_bytes, bytes_read, bytes_written, blocks_evicted of this rank's shard.");

absl::Status Stats(OpKernelContext* ctx) {
  std::vector<double> stats;
  TF_RETURN_IF_ERROR(WithTable(ctx, [&](Table& table, CallContext context) {
    table.Stats(context).ForEachField(
        [&](const char*, auto value) { stats.push_back(static_cast<double>(value)); });
  }));
  return SetVector(ctx, 0, stats);
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableStats").HostMemory("handle").HostMemory("stats"),
                          FunctionOp<Stats>);

REGISTER_OP("SokTableClear")
    .Input("handle: resource")
    .SetShapeFn(NoOutputs)
    .Doc("Removes every key; a key that comes back starts from its initial row.");

absl::Status Clear(OpKernelContext* ctx) {
  return WithTable(ctx, [](Table& table, CallContext context) { table.Clear(context); });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableClear").HostMemory("handle"), FunctionOp<Clear>);

REGISTER_OP("SokTableErase")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("num_erased: int64")
    .SetShapeFn(ScalarShape)
    .Doc("Removes keys [num_keys]; absent ones are ignored.");

absl::Status Erase(OpKernelContext* ctx) {
  const Tensor& keys = ctx->input(1);
  return SetNumberOfTable(ctx, [&](Table& table, CallContext context) {
    return table.Erase(context, Keys(keys), keys.NumElements());
  });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableErase").HostMemory("handle").HostMemory("num_erased"),
                          FunctionOp<Erase>);

}  // namespace
}  // namespace sok
