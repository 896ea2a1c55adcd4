// Ops that carry rows in and out of one table by key: find, assign, export, import.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cpp/tf/common.h"
#include "cpp/tf/snapshots.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

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
    OP_REQUIRES_OK(ctx, CheckRowsShape("rows", keys, rows, table->table().options()));
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
    .Output("records: int64")
    .Output("waiting: int64")
    .Output("counters: int64")
    .Output("step: int64")
    .Attr("with_slots: bool = true")
    .Attr("evict: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      c->set_output(2, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      c->set_output(3, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(4, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(5, c->Matrix(InferenceContext::kUnknownDim, 3));
      c->set_output(6, c->Matrix(InferenceContext::kUnknownDim, 3));
      c->set_output(7, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(8, c->Scalar());
      return absl::OkStatus();
    })
    .SetIsStateful()
    .Doc(
        "Keys, rows and slot rows of one instant, keys ascending as unsigned numbers. Of a table "
        "with policies also records [size, 3] (frequency, last step, score), waiting keys "
        "[num_waiting, 3] (key, count, last step), a Bloom filter's counters and the step; "
        "`evict` removes first what its policies remove when called.");

class TableExportOp : public OpKernel {
 public:
  explicit TableExportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_slots", &with_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TfExecutor ex(ctx);
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, Guard([&] { snapshot = table->table().Export(ex, with_slots_, evict_); }));
    OP_REQUIRES_OK(ctx, WriteSnapshot(ctx, snapshot, table->table().dim()));
  }

 private:
  bool with_slots_, evict_;
};
REGISTER_KERNEL_BUILDER(Name("SokTableExport").Device(tensorflow::DEVICE_CPU), TableExportOp);

REGISTER_OP("SokTableImport")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("rows: float")
    .Input("slot_rows: float")
    .Input("slot_names: string")
    .Input("slot_widths: int64")
    .Input("records: int64")
    .Input("waiting: int64")
    .Input("counters: int64")
    .Input("step: int64")
    .Attr("replace: bool = false")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Inserts or overwrites keys with rows and slot rows; `replace` removes all others first. "
        "Records, waiting keys and counters may be empty, and the step -1: not known.");

class TableImportOp : public OpKernel {
 public:
  explicit TableImportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replace", &replace_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, ReadSnapshot(ctx, table->table().options(), replace_, &snapshot));
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] { table->table().Import(ex, snapshot, replace_); }));
  }

 private:
  bool replace_;
};
REGISTER_KERNEL_BUILDER(Name("SokTableImport").Device(tensorflow::DEVICE_CPU), TableImportOp);

}  // namespace sok
