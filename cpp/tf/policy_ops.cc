// Ops on the admission and eviction policies of a table.
#include <algorithm>

#include "cpp/tf/common.h"

namespace sok {

REGISTER_OP("SokTableEvict")
    .Input("handle: resource")
    .Output("num_evicted: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Removes keys that have outlived their steps or fallen below the weight threshold.");

class TableEvictOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    Tensor* evicted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &evicted));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     evicted->scalar<int64_t>()() = table.Evict(context);
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableEvict").HostMemory("handle").HostMemory("num_evicted"),
                          TableEvictOp);

REGISTER_OP("SokTablePopEvicted")
    .Input("handle: resource")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("slot_rows: float")
    .Output("slot_names: string")
    .Output("slot_widths: int64")
    .Output("frequencies: int64")
    .Output("last_steps: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 7; ++i) {
        const bool is_matrix = i == 1 || i == 2;
        c->set_output(
            i, is_matrix ? c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim)
                         : c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc("Evicted rows that the table kept, oldest first; it keeps them no longer.");

class TablePopEvictedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    EvictedRows popped;
    int64_t dim = 0;
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext) {
                     popped = table.PopEvicted();
                     dim = table.dim();
                   }));
    OP_REQUIRES_OK(ctx, Write(ctx, popped, dim));
  }

 private:
  static absl::Status Write(OpKernelContext* ctx, const EvictedRows& popped, int64_t dim) {
    const int64_t n = popped.keys.size(), num_slots = popped.slot_names.size();
    int64_t slot_width = 0;
    for (int64_t width : popped.slot_widths) slot_width += width;
    Tensor *keys, *rows, *slot_rows, *names, *widths, *frequencies, *last_steps;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &keys));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n, dim}), &rows));
    TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({n, slot_width}), &slot_rows));
    TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({num_slots}), &names));
    TF_RETURN_IF_ERROR(ctx->allocate_output(4, TensorShape({num_slots}), &widths));
    TF_RETURN_IF_ERROR(ctx->allocate_output(5, TensorShape({n}), &frequencies));
    TF_RETURN_IF_ERROR(ctx->allocate_output(6, TensorShape({n}), &last_steps));
    std::copy(popped.keys.begin(), popped.keys.end(), Keys(keys));
    std::copy(popped.rows.begin(), popped.rows.end(), rows->flat<float>().data());
    std::copy(popped.slot_rows.begin(), popped.slot_rows.end(), slot_rows->flat<float>().data());
    std::copy(popped.slot_names.begin(), popped.slot_names.end(),
              names->flat<tensorflow::tstring>().data());
    std::copy(popped.slot_widths.begin(), popped.slot_widths.end(), widths->flat<int64_t>().data());
    std::copy(popped.frequencies.begin(), popped.frequencies.end(),
              frequencies->flat<int64_t>().data());
    std::copy(popped.last_steps.begin(), popped.last_steps.end(),
              last_steps->flat<int64_t>().data());
    return absl::OkStatus();
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTablePopEvicted")
                              .HostMemory("handle")
                              .HostMemory("keys")
                              .HostMemory("rows")
                              .HostMemory("slot_rows")
                              .HostMemory("slot_names")
                              .HostMemory("slot_widths")
                              .HostMemory("frequencies")
                              .HostMemory("last_steps"),
                          TablePopEvictedOp);

REGISTER_OP("SokTableStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(15));
      return absl::OkStatus();
    })
    .Doc(
        "size, seen, found, admitted, refused, written, erased, evicted, popped, buffered, "
        "dropped, waiting, forgotten, dropped_gradients, step of this rank's shard.");

class TableStatisticsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    PolicyCounts s;
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     s = table.Statistics(context);
                   }));
    const std::vector<int64_t> values = {
        s.size,    s.seen,   s.found,    s.admitted, s.refused, s.written,   s.erased,
        s.evicted, s.popped, s.buffered, s.dropped,  s.waiting, s.forgotten, s.dropped_gradients,
        s.step};
    Tensor* statistics;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({int64_t(values.size())}), &statistics));
    std::copy(values.begin(), values.end(), statistics->flat<int64_t>().data());
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableStatistics").HostMemory("handle").HostMemory("statistics"),
                          TableStatisticsOp);

REGISTER_OP("SokTableKeyStatistics")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("present: bool")
    .Output("frequencies: int64")
    .Output("last_steps: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      for (int i = 0; i < 3; ++i) c->set_output(i, keys);
      return absl::OkStatus();
    })
    .Doc(
        "Of keys [num_keys]: whether they have a row, how many training lookups contained them, "
        "and the step of the last one or -1.");

class TableKeyStatisticsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    const Tensor& keys = ctx->input(1);
    Tensor *present, *frequencies, *last_steps;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &present));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, keys.shape(), &frequencies));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, keys.shape(), &last_steps));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     table.KeyStatistics(context, Keys(keys), keys.NumElements(),
                                         reinterpret_cast<uint8_t*>(present->flat<bool>().data()),
                                         frequencies->flat<int64_t>().data(),
                                         last_steps->flat<int64_t>().data());
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableKeyStatistics").HostMemory("handle"), TableKeyStatisticsOp);

REGISTER_OP("SokTableAssignScores")
    .Input("handle: resource")
    .Input("keys: int64")
    .Input("scores: int64")
    .Output("num_assigned: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle keys, scores;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &keys));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(2), 1, &scores));
      TF_RETURN_IF_ERROR(c->Merge(keys, scores, &keys));
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .Doc("Custom scores [num_keys] of keys; missing keys are passed over.");

class TableAssignScoresOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    const Tensor &keys = ctx->input(1), &scores = ctx->input(2);
    OP_REQUIRES(ctx, keys.NumElements() == scores.NumElements(),
                absl::InvalidArgumentError("scores must be one a key"));
    Tensor* assigned;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &assigned));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext context) {
                     assigned->scalar<int64_t>()() = table.AssignScores(
                         context, Keys(keys), keys.NumElements(), scores.flat<int64_t>().data());
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(
    Name("SokTableAssignScores").HostMemory("handle").HostMemory("num_assigned"),
    TableAssignScoresOp);

REGISTER_OP("SokTableSetStep")
    .Input("handle: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      return c->WithRank(c->input(1), 0, &unused);
    })
    .Doc("Sets the table's step; the next training lookup is one beyond it.");

class TableSetStepOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES(ctx, tensorflow::TensorShapeUtils::IsScalar(ctx->input(1).shape()),
                absl::InvalidArgumentError("step must be a scalar"));
    OP_REQUIRES_OK(ctx, WithTable(ctx, [&](Table& table, CallContext) {
                     table.SetStep(ctx->input(1).scalar<int64_t>()());
                   }));
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableSetStep").HostMemory("handle").HostMemory("step"),
                          TableSetStepOp);

}  // namespace sok
