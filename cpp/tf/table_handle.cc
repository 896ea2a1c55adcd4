#include "cpp/tf/table_handle.h"

namespace sok {

using tensorflow::shape_inference::ShapeAndType;

REGISTER_OP("SokTableHandle")
    .Output("handle: resource")
    .Attr("container: string = ''")
    .Attr("shared_name: string")
    .Attr("table_name: string")
    .Attr("dim: int >= 1")
    .Attr("shape: shape")
    .Attr("key_type: {'int64', 'int32', 'uint64', 'uint32'} = 'int64'")
    .Attr("row_type: {'float32', 'bfloat16', 'float16'} = 'float32'")
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
    .Attr("count_occurrences: bool = false")
    .Attr("filter_freq: int = 0")
    .Attr("max_waiting: int = 0")
    .Attr("bloom_max_keys: int = 0")
    .Attr("bloom_probability: float = 0.01")
    .Attr("bloom_counter_bits: int = 64")
    .Attr("no_permission: float = 0.0")
    .Attr("steps_to_live: int = 0")
    .Attr("l2_threshold: float = -1.0")
    .Attr("score: string = ''")
    .Attr("evicted_buffer: int = 0")
    .Attr("storage_path: string = ''")
    .Attr("storage_memory: int = 0")
    .Attr("storage_file: int = 0")
    .Attr("storage_lfu: bool = true")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      tensorflow::PartialTensorShape shape;
      TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
      ShapeHandle handle;
      TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &handle));
      c->set_output_handle_shapes_and_types(
          0, std::vector<ShapeAndType>{{handle, tensorflow::DT_FLOAT}});
      return absl::OkStatus();
    })
    .Doc("This rank's shard of a table, created when first run. `shape` is what Python shows.");

REGISTER_KERNEL_BUILDER(Name("SokTableHandle").Device(tensorflow::DEVICE_CPU),
                        TableHandleOp<HostTableResource>);

absl::Status TableAttrs::Init(OpKernelConstruction* ctx) {
  std::string key_type, row_type, initializer;
  int64_t initializer_seed;
  TF_RETURN_IF_ERROR(ctx->GetAttr("container", &container_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("shared_name", &shared_name_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("table_name", &options_.name));
  TF_RETURN_IF_ERROR(ctx->GetAttr("dim", &options_.dim));
  TF_RETURN_IF_ERROR(ctx->GetAttr("key_type", &key_type));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_type", &row_type));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initial_capacity", &options_.initial_capacity));
  TF_RETURN_IF_ERROR(ctx->GetAttr("max_capacity", &options_.max_capacity));
  TF_RETURN_IF_ERROR(ctx->GetAttr("use_hashtable", &options_.use_hashtable));
  TF_RETURN_IF_ERROR(ctx->GetAttr("rank", &options_.rank));
  TF_RETURN_IF_ERROR(ctx->GetAttr("world_size", &options_.world_size));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializer", &initializer));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializer_a", &options_.initializer.a));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializer_b", &options_.initializer.b));
  TF_RETURN_IF_ERROR(ctx->GetAttr("initializer_seed", &initializer_seed));
  TF_RETURN_IF_ERROR(ctx->GetAttr("default_rows", &options_.initializer.default_rows));
  PolicyOptions& policy = options_.policy;
  std::string score;
  TF_RETURN_IF_ERROR(ReadFields(ctx, &policy));
  TF_RETURN_IF_ERROR(ctx->GetAttr("score", &score));
  TF_RETURN_IF_ERROR(ctx->GetAttr("storage_path", &options_.storage.path));
  TF_RETURN_IF_ERROR(ctx->GetAttr("storage_memory", &options_.storage.memory_bytes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("storage_file", &options_.storage.file_bytes));
  TF_RETURN_IF_ERROR(ctx->GetAttr("storage_lfu", &options_.storage.lfu));
  initializer_seed_ = static_cast<uint64_t>(initializer_seed);
  return Guard([&] {
    options_.key_type = ParseKeyType(key_type);
    options_.row_type = ParseRowType(row_type);
    options_.initializer.kind = ParseInitializerKind(initializer);
    options_.policy.score = ParseScoreKind(score);
    options_.Validate();
  });
}

absl::Status TableAttrs::Options(TableOptions* options) const {
  *options = options_;
  TF_RETURN_IF_ERROR(ProcessSeed(&options->seed));
  // An initializer's own seed is added to the job's, to distinguish tables of one name.
  options->seed += initializer_seed_ * 0x9E3779B97F4A7C15ull;
  return absl::OkStatus();
}

}  // namespace sok
