// Ops on the admission and eviction policies of a table.
#include <algorithm>

#include "cpp/tf/common.h"
#include "cpp/tf/policy_outputs.h"
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
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TfExecutor ex(ctx);
    Tensor* evicted;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &evicted));
    OP_REQUIRES_OK(ctx, Guard([&] { evicted->scalar<int64_t>()() = table->table().Evict(ex); }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableEvict").Device(tensorflow::DEVICE_CPU), TableEvictOp);

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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    EvictedRows popped;
    OP_REQUIRES_OK(ctx, Guard([&] { popped = table->table().PopEvicted(); }));
    OP_REQUIRES_OK(ctx, WriteEvictedRows(ctx, popped, table->table().dim()));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTablePopEvicted").Device(tensorflow::DEVICE_CPU),
                        TablePopEvictedOp);

REGISTER_OP("SokTableStatistics")
    .Input("handle: resource")
    .Output("statistics: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(14));
      return absl::OkStatus();
    })
    .Doc(
        "size, seen, found, admitted, refused, written, erased, evicted, popped, buffered, "
        "dropped, waiting, dropped_gradients, step of this rank's shard.");

class TableStatisticsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    PolicyStatistics s;
    OP_REQUIRES_OK(ctx, Guard([&] { s = table->table().Statistics(); }));
    OP_REQUIRES_OK(ctx, WriteStatistics(ctx, s));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableStatistics").Device(tensorflow::DEVICE_CPU),
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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    Tensor *present, *frequencies, *last_steps;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, keys.shape(), &present));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, keys.shape(), &frequencies));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, keys.shape(), &last_steps));
    OP_REQUIRES_OK(ctx, Guard([&] {
                     table->table().KeyStatistics(
                         Keys(keys), keys.NumElements(),
                         reinterpret_cast<uint8_t*>(present->flat<bool>().data()),
                         frequencies->flat<int64_t>().data(), last_steps->flat<int64_t>().data());
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableKeyStatistics").Device(tensorflow::DEVICE_CPU),
                        TableKeyStatisticsOp);

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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor &keys = ctx->input(1), &scores = ctx->input(2);
    OP_REQUIRES(ctx, keys.NumElements() == scores.NumElements(),
                absl::InvalidArgumentError("scores must be one a key"));
    Tensor* assigned;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &assigned));
    OP_REQUIRES_OK(ctx, Guard([&] {
                     assigned->scalar<int64_t>()() = table->table().AssignScores(
                         Keys(keys), keys.NumElements(), scores.flat<int64_t>().data());
                   }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableAssignScores").Device(tensorflow::DEVICE_CPU),
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
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    OP_REQUIRES(ctx, tensorflow::TensorShapeUtils::IsScalar(ctx->input(1).shape()),
                absl::InvalidArgumentError("step must be a scalar"));
    OP_REQUIRES_OK(ctx, Guard([&] { table->table().SetStep(ctx->input(1).scalar<int64_t>()()); }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTableSetStep").Device(tensorflow::DEVICE_CPU), TableSetStepOp);

}  // namespace sok
