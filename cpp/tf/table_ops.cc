// Ops on one table as a whole: its handle, its size and statistics, clear and erase.
#include <cstring>

#include "cpp/tf/common.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::ResourceHandle;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

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

REGISTER_OP("SokTableHandle")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string")
    .Attr("table_name: string")
    .Attr("dim: int >= 1")
    .Attr("shape: shape")
    .Attr("key_type: {'int64', 'int32', 'uint64', 'uint32'} = 'int64'")
    .Attr("initial_capacity: int = 0")
    .Attr("max_capacity: int = 0")
    .Attr("use_hashtable: bool = true")
    .Attr("rank: int = 0")
    .Attr("world_size: int = 1")
    .Attr("initializer: string = 'uniform'")
    .Attr("initializer_a: float = -0.05")
    .Attr("initializer_b: float = 0.05")
    .Attr("initializer_seed: int = 0")
    .Attr("default_rows: list(float) = []")
    .Attr("record: bool = false")
    .Attr("filter_freq: int = 0")
    .Attr("bloom_max_keys: int = 0")
    .Attr("bloom_probability: float = 0.01")
    .Attr("bloom_counter_bits: int = 64")
    .Attr("no_permission: float = 0.0")
    .Attr("steps_to_live: int = 0")
    .Attr("l2_threshold: float = -1.0")
    .Attr("score: string = ''")
    .Attr("evicted_buffer: int = 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      tensorflow::PartialTensorShape shape;
      TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
      ShapeHandle handle;
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &handle));
      c->set_output_handle_shapes_and_types(
          0,
          std::vector<tensorflow::shape_inference::ShapeAndType>{{handle, tensorflow::DT_FLOAT}});
      return absl::OkStatus();
    })
    .Doc("This rank's shard of a table, created when first run. `shape` is what Python shows.");

class TableHandleOp : public OpKernel {
 public:
  explicit TableHandleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string key_type, initializer;
    int64_t initializer_seed;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("container", &container_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &options_.name));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &options_.dim));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key_type", &key_type));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initial_capacity", &options_.initial_capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("max_capacity", &options_.max_capacity));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_hashtable", &options_.use_hashtable));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rank", &options_.rank));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &options_.world_size));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer", &initializer));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer_a", &options_.initializer.a));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer_b", &options_.initializer.b));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("initializer_seed", &initializer_seed));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("default_rows", &options_.initializer.default_rows));
    PolicyOptions& policy = options_.policy;
    std::string score;
    float bloom_probability;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("record", &policy.record));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("filter_freq", &policy.filter_freq));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bloom_max_keys", &policy.bloom_max_keys));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bloom_probability", &bloom_probability));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bloom_counter_bits", &policy.bloom_counter_bits));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("no_permission", &policy.no_permission));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("steps_to_live", &policy.steps_to_live));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("l2_threshold", &policy.l2_threshold));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("score", &score));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evicted_buffer", &policy.evicted_buffer));
    policy.bloom_probability = bloom_probability;
    initializer_seed_ = static_cast<uint64_t>(initializer_seed);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     options_.key_type = ParseKeyType(key_type);
                     options_.initializer.kind = ParseInitializerKind(initializer);
                     options_.policy.score = ParseScoreKind(score);
                     options_.Validate();
                   }));
  }

  void Compute(OpKernelContext* ctx) override {
    auto creator = [&](TableResource** resource) {
      TableOptions options = options_;
      TF_RETURN_IF_ERROR(ProcessSeed(&options.seed));
      // An initializer's own seed tells two tables of one name apart; it never replaces the job's.
      options.seed += initializer_seed_ * 0x9E3779B97F4A7C15ull;
      return Guard([&] { *resource = new TableResource(options); });
    };
    ResourceHandle handle = tensorflow::MakeResourceHandle<TableResource>(
        ctx, container_.empty() ? ctx->resource_manager()->default_container() : container_,
        shared_name_);
    TablePtr table;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupOrCreateResource<TableResource>(ctx, handle, &table, creator));
    Tensor* output;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    output->scalar<ResourceHandle>()() = handle;
  }

 private:
  TableOptions options_;
  std::string container_, shared_name_;
  uint64_t initializer_seed_ = 0;
};
REGISTER_KERNEL_BUILDER(Name("SokTableHandle").Device(tensorflow::DEVICE_CPU), TableHandleOp);

REGISTER_OP("SokTableSize")
    .Input("handle: resource")
    .Output("size: int64")
    .SetShapeFn(ScalarShape)
    .Doc("Keys held by this rank's shard.");

class TableSizeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    Tensor* size;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &size));
    size->scalar<int64_t>()() = table->table().size();
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableSize").Device(tensorflow::DEVICE_CPU), TableSizeOp);

REGISTER_OP("SokTableStats")
    .Input("handle: resource")
    .Output("stats: double")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(10));
      return absl::OkStatus();
    })
    .Doc(
        "size, capacity, max_capacity, num_buckets, load_factor, mean_probe_length, "
        "max_probe_length, index_bytes, arena_bytes, bytes of this rank's shard.");

class TableStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const TableStats s = table->table().Stats();
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
REGISTER_KERNEL_BUILDER(Name("SokTableStats").Device(tensorflow::DEVICE_CPU), TableStatsOp);

REGISTER_OP("SokTableClear")
    .Input("handle: resource")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Removes every key; a key that comes back starts from its initial row.");

class TableClearOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    OP_REQUIRES_OK(ctx, Guard([&] { table->table().Clear(); }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableClear").Device(tensorflow::DEVICE_CPU), TableClearOp);

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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TfExecutor ex(ctx);
    const Tensor& keys = ctx->input(1);
    Tensor* erased;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &erased));
    OP_REQUIRES_OK(ctx, Guard([&] {
                     erased->scalar<int64_t>()() =
                         table->table().Erase(ex, Keys(keys), keys.NumElements());
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableErase").Device(tensorflow::DEVICE_CPU), TableEraseOp);

}  // namespace sok
