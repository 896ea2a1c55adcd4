// Ops that carry rows in and out of one table by key: find, assign, export, import.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cpp/tf/common.h"
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
    OP_REQUIRES_OK(ctx, WritePolicy(ctx, snapshot.policy));
  }

 private:
  absl::Status WritePolicy(OpKernelContext* ctx, const RecordSnapshot& policy) const {
    const int64_t num_records = policy.records.size() / 3, num_waiting = policy.waiting.size();
    const int64_t num_counters = policy.counters.size();
    Tensor *records, *waiting, *counters, *step;
    TF_RETURN_IF_ERROR(ctx->allocate_output(5, TensorShape({num_records, 3}), &records));
    TF_RETURN_IF_ERROR(ctx->allocate_output(6, TensorShape({num_waiting, 3}), &waiting));
    TF_RETURN_IF_ERROR(ctx->allocate_output(7, TensorShape({num_counters}), &counters));
    TF_RETURN_IF_ERROR(ctx->allocate_output(8, TensorShape({}), &step));
    std::copy(policy.records.begin(), policy.records.end(), records->flat<int64_t>().data());
    int64_t* out = waiting->flat<int64_t>().data();
    for (const WaitingKey& key : policy.waiting) {
      *out++ = static_cast<int64_t>(key.key);
      *out++ = key.count;
      *out++ = key.last_step;
    }
    std::copy(policy.counters.begin(), policy.counters.end(), counters->flat<int64_t>().data());
    step->scalar<int64_t>()() = policy.step;
    return absl::OkStatus();
  }

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
    const Tensor &keys = ctx->input(1), &rows = ctx->input(2), &slot_rows = ctx->input(3);
    const int64_t n = keys.NumElements();
    OP_REQUIRES(ctx, ctx->input(4).NumElements() == ctx->input(5).NumElements(),
                absl::InvalidArgumentError(absl::StrCat(
                    "slot_names and slot_widths must be of one length. Received: ",
                    ctx->input(4).NumElements(), " and ", ctx->input(5).NumElements())));
    const TableOptions& options = table->table().options();
    OP_REQUIRES(ctx, !replace_ || options.max_capacity == 0 || n <= options.max_capacity,
                absl::ResourceExhaustedError(absl::StrCat(
                    "table '", options.name, "' holds at most ", options.max_capacity,
                    " keys on this rank. Received: ", n, " keys to replace its content with")));
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
    OP_REQUIRES_OK(ctx, ReadPolicy(ctx, &snapshot.policy));
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, Guard([&] { table->table().Import(ex, snapshot, replace_); }));
  }

 private:
  absl::Status ReadPolicy(OpKernelContext* ctx, RecordSnapshot* policy) const {
    const Tensor &records = ctx->input(6), &waiting = ctx->input(7), &counters = ctx->input(8);
    if (waiting.NumElements() % 3 != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "waiting must have shape [num_waiting, 3]. Received: ", waiting.shape().DebugString()));
    }
    const auto values = [](const Tensor& tensor) { return tensor.flat<int64_t>().data(); };
    if (!tensorflow::TensorShapeUtils::IsScalar(ctx->input(9).shape())) {
      return absl::InvalidArgumentError(absl::StrCat("step must be a scalar. Received: shape ",
                                                     ctx->input(9).shape().DebugString()));
    }
    policy->records.assign(values(records), values(records) + records.NumElements());
    policy->counters.assign(values(counters), values(counters) + counters.NumElements());
    for (int64_t i = 0; i < waiting.NumElements(); i += 3) {
      const int64_t* const key = values(waiting) + i;
      policy->waiting.push_back({static_cast<uint64_t>(key[0]), key[1], key[2]});
    }
    policy->step = ctx->input(9).scalar<int64_t>()();
    return absl::OkStatus();
  }

  bool replace_;
};
REGISTER_KERNEL_BUILDER(Name("SokTableImport").Device(tensorflow::DEVICE_CPU), TableImportOp);

}  // namespace sok
