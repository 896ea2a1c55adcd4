// The owner's side of a lookup in dense tables, whose rows are ordinary TensorFlow variables, and
// in hash tables beside them.
//
//     key message -> SokUnpackKeys -> local rows -> (tf.gather)  -> rows -> SokPackRows -> row
//                                     or keys    -> SokFindRows  ->                        message
//     back:          row message of gradients -> SokUnpackRows -> gradients of the rows
//
// Between the two are TensorFlow's own ops, so any optimizer sees ordinary sparse gradients. A
// feature's keys of all ranks come as one list, rank by rank.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cpp/core/place.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/row_layout.h"

namespace sok {

REGISTER_OP("SokUnpackKeys")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("local_rows: N * int64")
    .Attr("N: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("owners: list(int)")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Local rows of N features [num_keys] that all ranks asked this one for, rank by rank; the "
        "keys themselves where owners is -2, a hash table. owners are those of SokRoute.");

class UnpackKeysOp : public RankOp {
 public:
  explicit UnpackKeysOp(OpKernelConstruction* ctx) : RankOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("owners", &owners_));
    OP_REQUIRES(ctx, owners_.size() == static_cast<size_t>(num_outputs()),
                absl::InvalidArgumentError("owners must have one item per feature"));
  }

  void Compute(OpKernelContext* ctx) override {
    Segments segments;
    // A rank's failure reached every rank in this message: all raise it here.
    OP_REQUIRES_OK(ctx,
                   ParseKeys(ctx->input(0), ctx->input(1), world_size_, num_outputs(), &segments));
    for (int i = 0; i < num_outputs(); ++i) {
      int64_t num_keys = 0;
      for (const auto& of_rank : segments) num_keys += of_rank[i].num_keys;
      Tensor* out;
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, TensorShape({num_keys}), &out));
      int64_t* row = out->flat<int64_t>().data();
      const uint64_t divisor = owners_[i] == kByKey ? 1 : world_size_;
      for (const auto& of_rank : segments) {
        for (int64_t k = 0; k < of_rank[i].num_keys; ++k) *row++ = of_rank[i].keys[k] / divisor;
      }
    }
  }

 private:
  std::vector<int64_t> owners_;
};
REGISTER_KERNEL_BUILDER(Name("SokUnpackKeys").Device(tensorflow::DEVICE_CPU), UnpackKeysOp);

REGISTER_OP("SokFindRows")
    .Input("handle: resource")
    .Input("keys: int64")
    .Output("rows: float")
    .Output("problem: string")
    .Attr("dim: int >= 1")
    .Attr("insert: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int dim;
      TF_RETURN_IF_ERROR(c->GetAttr("dim", &dim));
      c->set_output(0, c->Matrix(c->Dim(c->input(1), 0), dim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Rows [num_keys, dim] of keys in this rank's shard, inserted where missing if `insert`. A "
        "table that cannot take them does not fail the op, for other ranks wait for its rows: the "
        "problem says why, and the rows are zeros.");

class FindRowsOp : public OpKernel {
 public:
  explicit FindRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    OP_REQUIRES(ctx, table->options().dim == dim_,
                absl::InvalidArgumentError(absl::StrCat(
                    "dim must be the table's, ", table->options().dim, ". Received: ", dim_)));
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    Tensor *rows, *problem;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n, dim_}), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &problem));
    float* const out = rows->flat<float>().data();
    const absl::Status status = table->Run(ctx, [&](CallContext context) {
      if (insert_) {
        table->table().FindOrInsert(context, Keys(keys), n, out, nullptr);
      } else {
        table->table().Find(context, Keys(keys), n, out, nullptr);
      }
    });
    if (status.ok()) return;
    problem->scalar<tensorflow::tstring>()() = std::string(status.message());
    OP_REQUIRES_OK(ctx, table->Run(ctx, [&](CallContext context) {
      table->table().WriteZeros(context, out, n);
    }));
  }

 private:
  int64_t dim_;
  bool insert_;
};
SOK_REGISTER_TABLE_KERNEL(Name("SokFindRows").HostMemory("handle").HostMemory("problem"),
                          FindRowsOp);

REGISTER_OP("SokPackRows")
    .Input("rows: N * float")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("problems: M * string")
    .Output("row_message: float")
    .Output("row_splits: int32")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("dims: list(int)")
    .Attr("gradient_scale: float = 1.0")
    .SetShapeFn(SetMessageShapes)
    .Doc(
        "Rows [num_keys, dim] of N features as the row message that answers the key message; or "
        "the "
        "first of the problems that is not empty, as this rank's failure.");

class PackRowsOp : public RankOp {
 public:
  explicit PackRowsOp(OpKernelConstruction* ctx) : RankOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dims", &dims_));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList rows;
    OP_REQUIRES_OK(ctx, ctx->input_list("rows", &rows));
    const int64_t n = dims_.size();
    OP_REQUIRES(ctx, rows.size() == n,
                absl::InvalidArgumentError("dims must have one item per feature"));
    Segments segments;
    OP_REQUIRES_OK(ctx, ParseKeys(ctx->input(n), ctx->input(n + 1), world_size_, n, &segments));
    const Call call = ReadHead(ctx->input(n).flat<int64_t>().data()).At(Stage::kRows);
    absl::Status status = FirstProblem(ctx);
    if (status.ok()) status = Write(ctx, rows, segments, call);
    if (!status.ok()) OP_REQUIRES_OK(ctx, FailAll<float>(ctx, status, call, world_size_));
  }

 private:
  absl::Status Write(OpKernelContext* ctx, const OpInputList& rows, const Segments& segments,
                     const Call& call) const {
    const RowLayout layout(segments, dims_);
    for (int i = 0; i < rows.size(); ++i) {
      const TensorShape expected({layout.num_rows(i), dims_[i]});
      if (rows[i].shape() != expected) {
        return absl::InvalidArgumentError(
            absl::StrCat("the rows of feature ", i, " must have the shape ", expected.DebugString(),
                         ", one row per key. Received: ", rows[i].shape().DebugString()));
      }
    }
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, layout.words()));
    float* const out = made.message.flat<float>().data();
    for (int64_t r = 0; r < world_size_; ++r) WriteHead(call, out + layout.head(r));
    for (int i = 0; i < rows.size(); ++i) {
      const float* next = rows[i].flat<float>().data();
      for (int64_t r = 0; r < world_size_; ++r) {
        const int64_t size = layout.count(r, i) * dims_[i];
        std::copy_n(next, size, out + layout.start(r, i));
        next += size;
      }
    }
    made.Set(ctx);
    return absl::OkStatus();
  }

  std::vector<int64_t> dims_;
};
REGISTER_KERNEL_BUILDER(Name("SokPackRows").Device(tensorflow::DEVICE_CPU), PackRowsOp);

REGISTER_OP("SokUnpackRows")
    .Input("row_message: float")
    .Input("row_splits: int32")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("rows: N * float")
    .Attr("N: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("dims: list(int)")
    .Attr("scale: float = 1.0")
    .SetShapeFn(SetRowShapes)
    .Doc("SokPackRows backwards, each value times scale.");

class UnpackRowsOp : public GradientOp {
 public:
  using GradientOp::GradientOp;

  void Compute(OpKernelContext* ctx) override {
    const int64_t n = dims_.size();
    const Tensor &rows = ctx->input(0), &row_splits = ctx->input(1);
    Segments segments;
    OP_REQUIRES_OK(ctx, ParseKeys(ctx->input(2), ctx->input(3), world_size_, n, &segments));
    OP_REQUIRES_OK(ctx, CheckSplits(rows, row_splits, world_size_));
    const RowLayout layout(segments, dims_);
    for (int64_t r = 0; r < world_size_; ++r) {
      const int64_t required = layout.words()[r], received = row_splits.flat<int32_t>()(r);
      OP_REQUIRES(ctx, required == received,
                  absl::InvalidArgumentError(
                      absl::StrCat("the rows of rank ", r, " must fill ", required,
                                   " words, one row per key. Received: ", received)));
    }
    for (int64_t i = 0; i < n; ++i) {
      Tensor* out;
      const TensorShape shape({layout.num_rows(i), dims_[i]});
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, shape, &out));
      float* next = out->flat<float>().data();
      for (int64_t r = 0; r < world_size_; ++r) {
        const float* const in = rows.flat<float>().data() + layout.start(r, i);
        next = std::transform(in, in + layout.count(r, i) * dims_[i], next,
                              [this](float value) { return value * scale_; });
      }
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("SokUnpackRows").Device(tensorflow::DEVICE_CPU), UnpackRowsOp);

}  // namespace sok
