// Ops on the admission and eviction policies of a table.
#include <vector>

#include "cpp/tf/common.h"
#include "cpp/tf/snapshots.h"

namespace sok {
namespace {

REGISTER_OP("SokTableEvict")
    .Input("handle: resource")
    .Output("num_evicted: int64")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("Removes keys that have outlived their steps or fallen below the weight threshold.");

absl::Status Evict(OpKernelContext* ctx) {
  return SetNumberOfTable(ctx,
                          [](Table& table, CallContext context) { return table.Evict(context); });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableEvict").HostMemory("handle").HostMemory("num_evicted"),
                          FunctionOp<Evict>);

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
      return SetShapes(c, {{-1}, {-1, -1}, {-1, -1}, {-1}, {-1}, {-1}, {-1}});
    })
    .Doc("Evicted rows that the table kept, oldest first; it keeps them no longer.");

absl::Status PopEvicted(OpKernelContext* ctx) {
  EvictedRows popped;
  int64_t dim = 0;
  TF_RETURN_IF_ERROR(WithTable(ctx, [&](Table& table, CallContext) {
    popped = table.PopEvicted();
    dim = table.dim();
  }));
  TF_RETURN_IF_ERROR(WriteRows(ctx, popped, dim));
  TF_RETURN_IF_ERROR(SetVector(ctx, 5, popped.frequencies));
  return SetVector(ctx, 6, popped.last_steps);
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTablePopEvicted")
                              .HostMemory("handle")
                              .HostMemory("keys")
                              .HostMemory("rows")
                              .HostMemory("slot_rows")
                              .HostMemory("slot_names")
                              .HostMemory("slot_widths")
                              .HostMemory("frequencies")
                              .HostMemory("last_steps"),
                          FunctionOp<PopEvicted>);

REGISTER_OP("SokTableStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return SetShapes(c, {{15}}); })
    .Doc(
        "size, seen, found, admitted, refused, written, erased, evicted, popped, buffered, "
        "dropped, waiting, forgotten, dropped_gradients, step of this rank's shard.");

absl::Status Statistics(OpKernelContext* ctx) {
  std::vector<int64_t> counts;
  TF_RETURN_IF_ERROR(WithTable(ctx, [&](Table& table, CallContext context) {
    table.Statistics(context).ForEachField(
        [&](const char*, int64_t count) { counts.push_back(count); });
  }));
  return SetVector(ctx, 0, counts);
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableStatistics").HostMemory("handle").HostMemory("statistics"),
                          FunctionOp<Statistics>);

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

absl::Status KeyStatistics(OpKernelContext* ctx) {
  const Tensor& keys = ctx->input(1);
  Tensor *present, *frequencies, *last_steps;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, keys.shape(), &present));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, keys.shape(), &frequencies));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, keys.shape(), &last_steps));
  return WithTable(ctx, [&](Table& table, CallContext context) {
    table.KeyStatistics(context, Keys(keys), keys.NumElements(), Flags(present),
                        frequencies->flat<int64_t>().data(), last_steps->flat<int64_t>().data());
  });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableKeyStatistics").HostMemory("handle"),
                          FunctionOp<KeyStatistics>);

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
      return ScalarShape(c);
    })
    .Doc("Sets the custom scores [num_keys] of keys; missing keys are ignored.");

absl::Status AssignScores(OpKernelContext* ctx) {
  const Tensor &keys = ctx->input(1), &scores = ctx->input(2);
  if (keys.NumElements() != scores.NumElements()) {
    return absl::InvalidArgumentError(
        absl::StrCat("scores must hold one score per key: ", keys.NumElements(),
                     ". Received: ", scores.NumElements()));
  }
  return SetNumberOfTable(ctx, [&](Table& table, CallContext context) {
    return table.AssignScores(context, Keys(keys), keys.NumElements(),
                              scores.flat<int64_t>().data());
  });
}
SOK_REGISTER_TABLE_KERNEL(
    Name("SokTableAssignScores").HostMemory("handle").HostMemory("num_assigned"),
    FunctionOp<AssignScores>);

REGISTER_OP("SokTableSetStep")
    .Input("handle: resource")
    .Input("step: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle unused;
      return c->WithRank(c->input(1), 0, &unused);
    })
    .Doc("Sets the table's step; the next training lookup is one beyond it.");

absl::Status SetStep(OpKernelContext* ctx) {
  if (!tensorflow::TensorShapeUtils::IsScalar(ctx->input(1).shape())) {
    return absl::InvalidArgumentError("step must be a scalar");
  }
  return WithTable(
      ctx, [&](Table& table, CallContext) { table.SetStep(ctx->input(1).scalar<int64_t>()()); });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableSetStep").HostMemory("handle").HostMemory("step"),
                          FunctionOp<SetStep>);

}  // namespace
}  // namespace sok
