// Export and import of a table's snapshot, which is in host memory wherever the table is.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cpp/tf/common.h"
#include "cpp/tf/snapshots.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace sok {

namespace {

absl::Status WritePolicy(OpKernelContext* ctx, const RecordSnapshot& policy) {
  const int64_t num_records = policy.records.size() / 3, num_waiting = policy.waiting.size();
  Tensor* waiting;
  TF_RETURN_IF_ERROR(ctx->allocate_output(6, TensorShape({num_waiting, 3}), &waiting));
  int64_t* out = waiting->flat<int64_t>().data();
  for (const WaitingKey& key : policy.waiting) {
    *out++ = static_cast<int64_t>(key.key);
    *out++ = key.count;
    *out++ = key.last_step;
  }
  TF_RETURN_IF_ERROR(SetOutput(ctx, 5, TensorShape({num_records, 3}), policy.records));
  TF_RETURN_IF_ERROR(SetVector(ctx, 7, policy.counters));
  return SetScalar(ctx, 8, policy.step);
}

absl::Status ReadPolicy(OpKernelContext* ctx, RecordSnapshot* policy) {
  const Tensor &records = ctx->input(6), &waiting = ctx->input(7), &counters = ctx->input(8);
  if (waiting.NumElements() % 3 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "waiting must have shape [num_waiting, 3]. Received: ", waiting.shape().DebugString()));
  }
  constexpr const char* kScalars[] = {"step", "optimizer_step", "initial_row_scale"};
  for (int i = 0; i < 3; ++i) {
    const tensorflow::TensorShape& shape = ctx->input(9 + i).shape();
    if (tensorflow::TensorShapeUtils::IsScalar(shape)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(kScalars[i], " must be a scalar. Received: shape ", shape.DebugString()));
  }
  policy->records = ValuesOf<int64_t>(records);
  policy->counters = ValuesOf<int64_t>(counters);
  for (int64_t i = 0; i < waiting.NumElements(); i += 3) {
    const int64_t* const key = waiting.flat<int64_t>().data() + i;
    policy->waiting.push_back({static_cast<uint64_t>(key[0]), key[1], key[2]});
  }
  policy->step = ctx->input(9).scalar<int64_t>()();
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckReplacement(const TableOptions& options, int64_t num_keys) {
  const bool bounded = options.max_capacity > 0 && !options.policy.evicts_by_score();
  if (!bounded || num_keys <= options.max_capacity) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", options.name, "' holds at most ", options.max_capacity,
      " keys on this rank. Received: ", num_keys, " keys to replace its content with"));
}

absl::Status WriteRows(OpKernelContext* ctx, const KeyedRows& content, int64_t dim) {
  const int64_t n = content.keys.size();
  TF_RETURN_IF_ERROR(SetVector(ctx, 0, content.keys));
  TF_RETURN_IF_ERROR(SetOutput(ctx, 1, TensorShape({n, dim}), content.rows));
  TF_RETURN_IF_ERROR(SetOutput(ctx, 2, TensorShape({n, content.slot_width()}), content.slot_rows));
  TF_RETURN_IF_ERROR(SetVector(ctx, 3, content.slot_names));
  return SetVector(ctx, 4, content.slot_widths);
}

absl::Status WriteSnapshot(OpKernelContext* ctx, const TableSnapshot& snapshot, int64_t dim) {
  TF_RETURN_IF_ERROR(WriteRows(ctx, snapshot, dim));
  TF_RETURN_IF_ERROR(SetScalar(ctx, 9, snapshot.optimizer_step));
  TF_RETURN_IF_ERROR(SetScalar(ctx, 10, snapshot.initial_row_scale));
  return WritePolicy(ctx, snapshot.policy);
}

namespace {

// Reads inputs 1 to 11 of SokTableImport and SokTableReadAside. Fails if they do not fit a table of
// these options; if they are to `replace` its content, also on more keys than it may hold: a bad
// import must not lose the present content.
absl::Status ReadSnapshot(OpKernelContext* ctx, const TableOptions& options, bool replace,
                          TableSnapshot* snapshot) {
  const Tensor &keys = ctx->input(1), &rows = ctx->input(2), &slot_rows = ctx->input(3);
  const Tensor &names = ctx->input(4), &widths = ctx->input(5);
  const int64_t n = keys.NumElements();
  if (names.NumElements() != widths.NumElements()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slot_names and slot_widths must have the same length. Received: ", names.NumElements(),
        " and ", widths.NumElements()));
  }
  if (replace) TF_RETURN_IF_ERROR(CheckReplacement(options, n));
  for (int64_t i = 0; i < names.NumElements(); ++i) {
    snapshot->slot_names.push_back(names.flat<tensorflow::tstring>()(i));
  }
  snapshot->slot_widths = ValuesOf<int64_t>(widths);
  const int64_t slot_width = snapshot->slot_width();
  if (rows.NumElements() != n * options.dim || slot_rows.NumElements() != n * slot_width) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows must hold ", n, " x ", options.dim, " and slot_rows ", n, " x ",
                     slot_width, " floats. Received: ", rows.shape().DebugString(), " and ",
                     slot_rows.shape().DebugString(), " (table '", options.name, "')"));
  }
  snapshot->keys.assign(Keys(keys), Keys(keys) + n);
  snapshot->rows = ValuesOf<float>(rows);
  snapshot->slot_rows = ValuesOf<float>(slot_rows);
  TF_RETURN_IF_ERROR(ReadPolicy(ctx, &snapshot->policy));
  snapshot->optimizer_step = ctx->input(10).scalar<int64_t>()();
  snapshot->initial_row_scale = ctx->input(11).scalar<double>()();
  return absl::OkStatus();
}

}  // namespace

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
    .Output("optimizer_step: int64")
    .Output("initial_row_scale: double")
    .Attr("with_slots: bool = true")
    .Attr("evict: bool = false")
    .SetShapeFn([](InferenceContext* c) {
      return SetShapes(c,
                       {{-1}, {-1, -1}, {-1, -1}, {-1}, {-1}, {-1, 3}, {-1, 3}, {-1}, {}, {}, {}});
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
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, table->Run(ctx, [&](CallContext context) {
      snapshot = table->table().Export(context, with_slots_, evict_);
    }));
    OP_REQUIRES_OK(ctx, WriteSnapshot(ctx, snapshot, table->options().dim));
  }

 private:
  bool with_slots_, evict_;
};
SOK_REGISTER_TABLE_KERNEL(SOK_SNAPSHOT_IN_HOST_MEMORY(Name("SokTableExport")), TableExportOp);

// The inputs of ops that take a snapshot, for ReadSnapshot.
#define SOK_SNAPSHOT_INPUTS(op)       \
  op.Input("handle: resource")        \
      .Input("keys: int64")           \
      .Input("rows: float")           \
      .Input("slot_rows: float")      \
      .Input("slot_names: string")    \
      .Input("slot_widths: int64")    \
      .Input("records: int64")        \
      .Input("waiting: int64")        \
      .Input("counters: int64")       \
      .Input("step: int64")           \
      .Input("optimizer_step: int64") \
      .Input("initial_row_scale: double")

SOK_SNAPSHOT_INPUTS(REGISTER_OP("SokTableImport"))
    .Attr("replace: bool = false")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Inserts or overwrites keys with rows and slot rows; `replace` removes all others first. "
        "Records, waiting keys and counters may be empty, and the steps and the scale -1: not "
        "known.");

class TableImportOp : public OpKernel {
 public:
  explicit TableImportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replace", &replace_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, ReadSnapshot(ctx, table->options(), replace_, &snapshot));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& target, CallContext context) {
                     target.Import(context, snapshot, replace_);
                   }));
  }

 private:
  bool replace_;
};
SOK_REGISTER_TABLE_KERNEL(SOK_SNAPSHOT_IN_HOST_MEMORY(Name("SokTableImport")), TableImportOp);

// ---- a restore over ranks: each reads its part aside, and takes it once all have theirs ----

namespace {

// A table aside, freed with the tensor that holds it.
struct Aside {
  std::shared_ptr<Table> table;

  std::string TypeName() const { return "sok::Aside"; }
  void Encode(tensorflow::VariantTensorData*) const {}  // it does not leave the process
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
  std::string DebugString() const { return "table aside"; }
};

// A function that ran on a GPU returns its variants as if they were in device memory. This one is
// not: TensorFlow copies it in any direction by copying nothing.
absl::Status CopyAside(const Aside& from, Aside* to,
                       const tensorflow::UnaryVariantOpRegistry::AsyncTensorDeviceCopyFn&) {
  *to = from;
  return absl::OkStatus();
}
using tensorflow::TypeIndex;  // for the macro
using tensorflow::VariantDeviceCopyDirection;
namespace variant_op_registry_fn_registration = tensorflow::variant_op_registry_fn_registration;
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Aside,
                                                     VariantDeviceCopyDirection::HOST_TO_DEVICE,
                                                     CopyAside);
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Aside,
                                                     VariantDeviceCopyDirection::DEVICE_TO_HOST,
                                                     CopyAside);
INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(Aside,
                                                     VariantDeviceCopyDirection::DEVICE_TO_DEVICE,
                                                     CopyAside);

}  // namespace

SOK_SNAPSHOT_INPUTS(REGISTER_OP("SokTableReadAside"))
    .Input("made: int64")
    .Output("aside: variant")
    .Output("problem: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return SetShapes(c, {{}, {}}); })
    .Doc(
        "Makes a second table of the same kind, with the content that SokTableImport would give "
        "it, and leaves the first table unchanged. If that is impossible, the op does not fail but "
        "returns the reason in `problem`, so that its rank can tell the others. `made` is the "
        "number of a second table that was made in parts (sok_aside_keep); if it is 0, there is no "
        "such table and the other inputs are read.");

absl::Status ReadAside(OpKernelContext* ctx) {
  TablePtr table;
  TF_RETURN_IF_ERROR(LookupTable(ctx, &table));
  Aside found;
  TableSnapshot snapshot;
  const int64_t number = ctx->input(12).scalar<int64_t>()();
  found.table = TakeMadeAside(number);
  absl::Status status = absl::OkStatus();
  if (found.table == nullptr && number != 0) {
    status = absl::FailedPreconditionError(
        absl::StrCat("Only one restore of a table may run at a time. Received: two (table '",
                     table->options().name, "')"));
  } else if (found.table == nullptr) {
    status = ReadSnapshot(ctx, table->options(), /*replace=*/true, &snapshot);
  }
  if (found.table == nullptr && status.ok()) {
    status = table->Run(ctx, [&](CallContext context) {
      std::unique_ptr<Table> made = table->table().MakeAside(context);
      made->Import(context, snapshot);
      found.table = std::move(made);
    });
  }
  TF_RETURN_IF_ERROR(SetScalar<tensorflow::Variant>(ctx, 0, std::move(found)));
  return SetScalar(ctx, 1, status.ok() ? std::string() : status.ToString());
}
SOK_REGISTER_TABLE_KERNEL(SOK_SNAPSHOT_IN_HOST_MEMORY(Name("SokTableReadAside"))
                              .HostMemory("made")
                              .HostMemory("aside")
                              .HostMemory("problem"),
                          FunctionOp<ReadAside>);

REGISTER_OP("SokTableTakeAside")
    .Input("handle: resource")
    .Input("aside: variant")
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Replaces a table's content by that of `aside`, which must not be used again.");

absl::Status TakeAside(OpKernelContext* ctx) {
  const auto* const aside = ctx->input(1).scalar<tensorflow::Variant>()().get<Aside>();
  if (aside == nullptr || aside->table == nullptr) {
    return absl::InvalidArgumentError(
        "aside must be an output of SokTableReadAside whose problem is empty");
  }
  return WithTable(
      ctx, [&](Table& table, CallContext context) { table.TakeContent(context, *aside->table); });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableTakeAside").HostMemory("handle").HostMemory("aside"),
                          FunctionOp<TakeAside>);

}  // namespace sok
