// Ops on one table as a whole: its handle, its size and statistics, export, import, assign, erase.
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
    initializer_seed_ = static_cast<uint64_t>(initializer_seed);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     options_.key_type = ParseKeyType(key_type);
                     options_.initializer.kind = ParseInitializerKind(initializer);
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

REGISTER_OP("SokTableAssign")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, rows;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 2, &rows));
      return absl::OkStatus();
    })
    .Doc("Writes rows [num_keys, dim], inserting missing keys; of equal keys the last wins.");

class TableAssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    const Tensor& rows = ctx->input(2);
    OP_REQUIRES(ctx,
                rows.dims() == 2 && rows.dim_size(0) == keys.NumElements() &&
                    rows.dim_size(1) == table->table().dim(),
                absl::InvalidArgumentError(absl::StrCat(
                    "rows must have the shape [num_keys, dim] = [", keys.NumElements(), ", ",
                    table->table().dim(), "]. Received: ", rows.shape().DebugString(), " (table '",
                    table->table().options().name, "')")));
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     table->table().Assign(ex, Keys(keys), keys.NumElements(),
                                           rows.flat<float>().data());
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableAssign").Device(tensorflow::DEVICE_CPU), TableAssignOp);

REGISTER_OP("SokTableFind")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("rows: float")
    .Output("found: bool")
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      c->set_output(0, c->Matrix(c->Dim(keys, 0), InferenceContext::kUnknownDim));
      c->set_output(1, keys);
      return absl::OkStatus();
    })
    .Doc("Rows [num_keys, dim] of keys; a missing key reads its initial row and is not inserted.");

class TableFindOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    Tensor *rows, *found;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n, table->table().dim()}), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n}), &found));
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     table->table().Find(ex, Keys(keys), n, rows->flat<float>().data(),
                                         reinterpret_cast<uint8_t*>(found->flat<bool>().data()));
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableFind").Device(tensorflow::DEVICE_CPU), TableFindOp);

REGISTER_OP("SokTableExport")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("slot_rows: float")
    .Output("slot_names: string")
    .Output("slot_widths: int64")
    .Attr("with_slots: bool = true")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      c->set_output(2, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(4, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .SetIsStateful()
    .Doc("Keys, rows and slot rows of one instant, keys ascending as unsigned numbers.");

class TableExportOp : public OpKernel {
 public:
  explicit TableExportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_slots", &with_slots_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TfExecutor ex(ctx);
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, Guard([&] { snapshot = table->table().Export(ex, with_slots_); }));
    const int64_t n = snapshot.keys.size();
    int64_t slot_width = 0;
    for (int64_t width : snapshot.slot_widths) slot_width += width;
    const int64_t num_slots = snapshot.slot_names.size();
    Tensor *keys, *rows, *slot_rows, *names, *widths;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n}), &keys));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n, table->table().dim()}), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({n, slot_width}), &slot_rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, TensorShape({num_slots}), &names));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(4, TensorShape({num_slots}), &widths));
    std::copy(snapshot.keys.begin(), snapshot.keys.end(), Keys(keys));
    std::copy(snapshot.rows.begin(), snapshot.rows.end(), rows->flat<float>().data());
    std::copy(snapshot.slot_rows.begin(), snapshot.slot_rows.end(),
              slot_rows->flat<float>().data());
    for (int64_t i = 0; i < num_slots; ++i) {
      names->flat<tensorflow::tstring>()(i) = snapshot.slot_names[i];
      widths->flat<int64_t>()(i) = snapshot.slot_widths[i];
    }
  }

 private:
  bool with_slots_;
};
REGISTER_KERNEL_BUILDER(Name("SokTableExport").Device(tensorflow::DEVICE_CPU), TableExportOp);

REGISTER_OP("SokTableImport")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .Input("slot_rows: float")
    .Input("slot_names: string")
    .Input("slot_widths: int64")
    .Attr("replace: bool = false")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Inserts or overwrites keys with rows and slot rows; `replace` removes all others first.");

class TableImportOp : public OpKernel {
 public:
  explicit TableImportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replace", &replace_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor &keys = ctx->input(1), &rows = ctx->input(2), &slot_rows = ctx->input(3);
    const int64_t n = keys.NumElements();
    TableSnapshot snapshot;
    int64_t slot_width = 0;
    for (int64_t i = 0; i < ctx->input(4).NumElements(); ++i) {
      snapshot.slot_names.push_back(ctx->input(4).flat<tensorflow::tstring>()(i));
      snapshot.slot_widths.push_back(ctx->input(5).flat<int64_t>()(i));
      slot_width += snapshot.slot_widths.back();
    }
    // Checked before the table is cleared: a bad import must not cost what is there.
    OP_REQUIRES(
        ctx,
        rows.NumElements() == n * table->table().dim() && slot_rows.NumElements() == n * slot_width,
        absl::InvalidArgumentError(absl::StrCat(
            "rows must hold ", n, " x ", table->table().dim(), " and slot_rows ", n, " x ",
            slot_width, " floats. Received: ", rows.shape().DebugString(), " and ",
            slot_rows.shape().DebugString(), " (table '", table->table().options().name, "')")));
    snapshot.keys.assign(Keys(keys), Keys(keys) + n);
    snapshot.rows.assign(rows.flat<float>().data(), rows.flat<float>().data() + rows.NumElements());
    snapshot.slot_rows.assign(slot_rows.flat<float>().data(),
                              slot_rows.flat<float>().data() + slot_rows.NumElements());
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] {
                     if (replace_) table->table().Clear();
                     table->table().Import(ex, snapshot);
                   }));
  }

 private:
  bool replace_;
};
REGISTER_KERNEL_BUILDER(Name("SokTableImport").Device(tensorflow::DEVICE_CPU), TableImportOp);

}  // namespace sok
