// What changed in a table since a dump, out of it.
#include <algorithm>

#include "cpp/core/changes.h"
#include "cpp/tf/common.h"
#include "cpp/tf/snapshots.h"

namespace sok {

REGISTER_OP("SokTableExportChanges")
    .Input("handle: resource")
    .Input("since: int64")
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
    .Output("erased: int64")
    .Output("whole: bool")
    .Output("steps: double")
    .Output("optimizer: string")
    .Output("number: int64")
    .Output("problem: string")
    .SetShapeFn([](InferenceContext* c) {
      const auto unknown = InferenceContext::kUnknownDim;
      for (int i : {0, 3, 4, 7, 10}) c->set_output(i, c->Vector(unknown));
      for (int i : {1, 2}) c->set_output(i, c->Matrix(unknown, unknown));
      for (int i : {5, 6, 12}) c->set_output(i, c->Matrix(unknown, 3));
      for (int i : {8, 9, 11, 13, 14, 15}) c->set_output(i, c->Scalar());
      return absl::OkStatus();
    })
    .SetIsStateful()
    .Doc(
        "As SokTableExport with slots, after eviction: the keys touched since the instant `since`, "
        "the keys erased, and the steps that move the others, [num_runs, 3]: count (0: all rows "
        "were brought up to date), learning rate, number of the first. `whole`: all keys, which "
        "replace what was there. since 0: all keys. `number` names this instant. `problem` is what "
        "stands against it, mostly empty: the op itself does not fail, so that its rank can tell "
        "the others.");

class TableExportChangesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    OP_REQUIRES(ctx, tensorflow::TensorShapeUtils::IsScalar(ctx->input(1).shape()),
                absl::InvalidArgumentError("since must be a scalar"));
    const int64_t since = ctx->input(1).scalar<int64_t>()();
    TableChanges changes;
    const absl::Status status = table->Run(
        ctx, [&](CallContext context) { changes = table->table().ExportChanges(context, since); });
    if (!status.ok()) changes = TableChanges();
    OP_REQUIRES_OK(ctx, WriteSnapshot(ctx, changes.snapshot, table->options().dim));
    Tensor *erased, *whole, *steps, *optimizer, *number, *problem;
    const int64_t num_erased = changes.erased.size(), num_runs = changes.steps.size();
    OP_REQUIRES_OK(ctx, ctx->allocate_output(10, TensorShape({num_erased}), &erased));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(11, TensorShape({}), &whole));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(12, TensorShape({num_runs, 3}), &steps));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(13, TensorShape({}), &optimizer));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(14, TensorShape({}), &number));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(15, TensorShape({}), &problem));
    if (!status.ok()) problem->scalar<tensorflow::tstring>()() = status.ToString();
    std::copy(changes.erased.begin(), changes.erased.end(), Keys(erased));
    whole->scalar<bool>()() = changes.whole;
    double* out = steps->flat<double>().data();
    for (const StepRun& run : changes.steps) {
      *out++ = static_cast<double>(run.count);
      *out++ = run.learning_rate;
      *out++ = static_cast<double>(run.step);
    }
    optimizer->scalar<tensorflow::tstring>()() = changes.optimizer;
    number->scalar<int64_t>()() = changes.number;
  }
};
SOK_REGISTER_TABLE_KERNEL(SOK_SNAPSHOT_IN_HOST_MEMORY(Name("SokTableExportChanges"))
                              .HostMemory("since")
                              .HostMemory("erased")
                              .HostMemory("whole")
                              .HostMemory("steps")
                              .HostMemory("optimizer")
                              .HostMemory("number")
                              .HostMemory("problem"),
                          TableExportChangesOp);

REGISTER_OP("SokTableKeepChanges")
    .Input("handle: resource")
    .Input("keep: bool")
    .Output("number: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .SetIsStateful()
    .Doc("Where `keep`, the table keeps what changes from here on; the number of this instant.");

class TableKeepChangesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    int64_t kept = 0;
    if (ctx->input(1).scalar<bool>()()) {
      OP_REQUIRES_OK(ctx, table->Run(ctx, [&](CallContext context) {
        kept = table->table().KeepChanges(context);
      }));
    }
    Tensor* number;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &number));
    number->scalar<int64_t>()() = kept;
  }
};
SOK_REGISTER_TABLE_KERNEL(
    Name("SokTableKeepChanges").HostMemory("handle").HostMemory("keep").HostMemory("number"),
    TableKeepChangesOp);

}  // namespace sok
