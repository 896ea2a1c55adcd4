// Keeps ranks in step: whole exchanges take turns, and each message says which call it is of.
//
//     SokTurn -> SokStampCall =exchange=> SokCheckMessage -> .. -> SokTurn        one lookup's turn
//
// SokTurn computes nothing. It takes the process's token, a resource, so TensorFlow keeps the turns
// of a function or a loop in program order. A lookup that failed on all ranks ends the step before
// any rank has begun the next one.
#include <algorithm>
#include <cstring>

#include "cpp/tf/messages.h"

namespace sok {

REGISTER_OP("SokTurn")
    .Input("token: resource")
    .Attr("number: int = -1")
    .Attr("ends: bool = false")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc(
        "The begin or the end of a turn of exchanges in this process. In a session's graph, where "
        "session_order.cc orders them, a turn has a number of its own.");

class TurnOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {}
};
REGISTER_KERNEL_BUILDER(Name("SokTurn").Device(tensorflow::DEVICE_CPU), TurnOp);

REGISTER_OP("SokStampCall")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("stamped: int64")
    .Attr("lookup: string")
    .Attr("line: int = 0")
    .Attr("stage: int")
    .Attr("wire_dtype: {float, bfloat16, half} = DT_FLOAT")
    .SetIsStateful()  // counts the calls
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return absl::OkStatus();
    })
    .Doc(
        "The message with each block's head saying that it is of the next call of lookup, whose "
        "rows travel as wire_dtype. Within a turn, so that all ranks count calls alike.");

class StampCallOp : public StampOp {
 public:
  using StampOp::StampOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(ctx->input(0), splits, splits.NumElements()));
    Tensor* stamped;
    int forwarded = -1;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, ctx->input(0).shape(),
                                                              &stamped, &forwarded));
    int64_t* block = stamped->flat<int64_t>().data();
    if (forwarded < 0) std::memcpy(block, ctx->input(0).data(), stamped->TotalBytes());
    Call call = Next();
    for (int64_t r = 0; r < splits.NumElements(); ++r) {
      call.words[0] = block[0];  // a failed block stays failed
      WriteHead(call, block);
      block += splits.flat<int32_t>()(r);
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("SokStampCall").Device(tensorflow::DEVICE_CPU), StampCallOp);

REGISTER_OP("SokCheckMessage")
    .Input("message: float")
    .Input("splits: int32")
    .Output("call: int64")
    .Output("more_rounds: int32")
    .Attr("world_size: int >= 1")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Vector(Call::kNumWords));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "The call [8] that a received message is of, and how many rounds bring the rest of it. "
        "Raises that the ranks' blocks are of different calls, or the failure that a whole message "
        "carries; on every rank, since every rank sees all heads.");

class CheckMessageOp : public RankOp {
 public:
  using RankOp::RankOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    OP_REQUIRES_OK(ctx, SetCall(ctx, message.flat<float>().data(), splits.flat<int32_t>().data(),
                                world_size_));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokCheckMessage").Device(tensorflow::DEVICE_CPU), CheckMessageOp);

REGISTER_OP("SokPackNote")
    .Input("values: int64")
    .Input("problems: M * string")
    .Output("message: int64")
    .Output("splits: int32")
    .Attr("M: int >= 0")
    .Attr("world_size: int >= 1")
    .SetShapeFn(SetMessageShapes)
    .Doc(
        "The same values for every rank, as one message; or the first of the problems that is not "
        "empty, as this rank's failure.");

class PackNoteOp : public RankOp {
 public:
  using RankOp::RankOp;

  void Compute(OpKernelContext* ctx) override {
    const Call call;  // SokStampCall says which
    const Tensor& values = ctx->input(0);
    const int64_t words = kHeadWords<int64_t> + values.NumElements();
    OutputMessage note;
    absl::Status status = FirstProblem(ctx);
    if (status.ok()) status = note.Allocate(ctx, std::vector<int64_t>(world_size_, words));
    if (!status.ok()) {
      OP_REQUIRES_OK(ctx, FailAll<int64_t>(ctx, status, call, world_size_));
      return;
    }
    int64_t* out = note.message.flat<int64_t>().data();
    for (int64_t r = 0; r < world_size_; ++r, out += words) {
      WriteHead(call, out);
      std::copy_n(values.flat<int64_t>().data(), values.NumElements(), out + kHeadWords<int64_t>);
    }
    note.Set(ctx);
  }
};
REGISTER_KERNEL_BUILDER(Name("SokPackNote").Device(tensorflow::DEVICE_CPU), PackNoteOp);

REGISTER_OP("SokUnpackNote")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("values: int64")
    .Output("lengths: int32")
    .Attr("world_size: int >= 1")
    .SetIsStateful()
    .SetShapeFn(SetMessageShapes)
    .Doc(
        "The values of all ranks, in rank order, and how many each sent. Raises as "
        "SokCheckMessage.");

class UnpackNoteOp : public RankOp {
 public:
  using RankOp::RankOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    const int64_t* words = message.flat<int64_t>().data();
    OP_REQUIRES_OK(ctx, RaiseFailure(words, splits.flat<int32_t>().data(), world_size_));
    Tensor *values, *lengths;
    const int64_t num_values = message.NumElements() - world_size_ * kHeadWords<int64_t>;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({num_values}), &values));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({world_size_}), &lengths));
    int64_t* out = values->flat<int64_t>().data();
    for (int64_t r = 0; r < world_size_; ++r) {
      const int64_t length = splits.flat<int32_t>()(r) - kHeadWords<int64_t>;
      out = std::copy_n(words + kHeadWords<int64_t>, length, out);
      words += splits.flat<int32_t>()(r);
      lengths->flat<int32_t>()(r) = length;
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("SokUnpackNote").Device(tensorflow::DEVICE_CPU), UnpackNoteOp);

}  // namespace sok
