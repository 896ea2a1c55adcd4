// Ops that carry rows in and out of one table by key: find, assign.
#include "cpp/tf/common.h"

namespace sok {
namespace {

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

absl::Status Assign(OpKernelContext* ctx) {
  TablePtr table;
  TF_RETURN_IF_ERROR(LookupTable(ctx, &table));
  const Tensor &keys = ctx->input(1), &rows = ctx->input(2);
  TF_RETURN_IF_ERROR(CheckRowsShape("rows", keys, rows, table->options()));
  return WithTable(ctx, [&](Table& target, CallContext context) {
    target.Assign(context, Keys(keys), keys.NumElements(), rows.flat<float>().data());
  });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableAssign").HostMemory("handle"), FunctionOp<Assign>);

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

absl::Status Find(OpKernelContext* ctx) {
  TablePtr table;
  TF_RETURN_IF_ERROR(LookupTable(ctx, &table));
  const Tensor& keys = ctx->input(1);
  const int64_t n = keys.NumElements();
  Tensor *rows, *found;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n, table->options().dim}), &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n}), &found));
  return table->Run(ctx, [&](CallContext context) {
    table->table().Find(context, Keys(keys), n, rows->flat<float>().data(), Flags(found));
  });
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableFind").HostMemory("handle"), FunctionOp<Find>);

}  // namespace
}  // namespace sok
