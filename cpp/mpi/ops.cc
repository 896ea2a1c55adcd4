// The engine's exchanges and collectives as TensorFlow ops. None blocks a thread of TensorFlow while
// it waits; what follows an op runs on TensorFlow's pool.
#include <cstring>

#include "cpp/mpi/engine.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

namespace {

// The tensors of an op; alive until MPI has left them, even if the op has ended before.
struct Tensors {
  Tensor input;
  std::vector<Tensor> outputs;
};

absl::Status StatusOf(const Outcome& outcome) {
  switch (outcome.kind) {
    case Outcome::kDone:
      return absl::OkStatus();
    case Outcome::kStopped:
      return absl::DeadlineExceededError(outcome.text);
    case Outcome::kCancelled:
      return absl::CancelledError(outcome.text);
    case Outcome::kMismatch:
      return absl::InvalidArgumentError(outcome.text);
  }
  return absl::InternalError(outcome.text);
}

Mpi::Type TypeOf(tensorflow::DataType dtype) {
  switch (dtype) {
    case tensorflow::DT_FLOAT:
      return Mpi::Type::kFloat;
    case tensorflow::DT_DOUBLE:
      return Mpi::Type::kDouble;
    case tensorflow::DT_INT32:
      return Mpi::Type::kInt32;
    default:
      return Mpi::Type::kInt64;
  }
}

int64_t RowElements(const Tensor& tensor) {
  int64_t elements = 1;
  for (int axis = 1; axis < tensor.dims(); ++axis) elements *= tensor.dim_size(axis);
  return elements;
}

TensorShape WithRows(const Tensor& tensor, int64_t rows) {
  TensorShape shape = tensor.shape();
  shape.set_dim(0, rows);
  return shape;
}

char* Bytes(const Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(tensor.data())));
}

Tensor Allocated(tensorflow::Allocator* allocator, tensorflow::DataType dtype,
                 const TensorShape& shape) {
  Tensor tensor(allocator, dtype, shape);
  if (!tensor.IsInitialized()) throw std::bad_alloc();
  return tensor;
}

class RequestOp : public AsyncOpKernel {
 public:
  explicit RequestOp(OpKernelConstruction* ctx) : AsyncOpKernel(ctx) {
    int group = 0;
    std::string key;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("group", &group));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("key", &key));
    OP_REQUIRES(ctx, DataTypeCanUseMemcpy(ctx->input_type(0)),
                absl::InvalidArgumentError("ranks can exchange numbers only. Received: dtype " +
                                           DataTypeString(ctx->input_type(0))));
    group_ = &Engine::Get().group(group);
    key_ = group_->prefix + ctx->def().op() + ":" + (key.empty() ? ctx->def().name() : key);
    OP_REQUIRES(
        ctx, key_.size() <= kLongestKey,
        absl::InvalidArgumentError("the name of a collective must have at most " +
                                   std::to_string(kLongestKey) + " bytes. Received: " + key_));
  }

  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    auto tensors = std::make_shared<Tensors>();
    tensors->input = ctx->input(0);
    std::unique_ptr<Request> request;
    OP_REQUIRES_OK_ASYNC(ctx, Prepare(ctx, tensors, &request), done);
    request->key = key_;
    request->group = group_;
    request->dtype = tensors->input.dtype();
    request->buffers = tensors;
    HandIn(ctx, std::move(done), tensors, std::move(request));
  }

 protected:
  virtual absl::Status Prepare(OpKernelContext* ctx, const std::shared_ptr<Tensors>& tensors,
                               std::unique_ptr<Request>* request) = 0;
  int size() const { return static_cast<int>(group_->ranks.size()); }
  const RankGroup& group() const { return *group_; }

 private:
  void HandIn(OpKernelContext* ctx, DoneCallback done, const std::shared_ptr<Tensors>& tensors,
              std::unique_ptr<Request> request) {
    Engine& engine = Engine::Get();
    const int64_t id = request->id = engine.NewId();
    auto* const cancellation = ctx->cancellation_manager();
    const auto token = cancellation == nullptr ? 0 : cancellation->get_cancellation_token();
    const auto cancelled = std::make_shared<std::atomic<bool>>(false);
    const std::string why = "the step failed elsewhere";
    if (cancellation != nullptr) {
      const bool registered = cancellation->RegisterCallback(token, [&engine, id, cancelled, why] {
        *cancelled = true;
        engine.Cancel(id, why);
      });
      OP_REQUIRES_ASYNC(ctx, registered, absl::CancelledError(why), done);
    }
    request->done = [ctx, done, tensors, cancellation, token](const Outcome& outcome) {
      (*ctx->runner())([ctx, done, tensors, cancellation, token, outcome] {
        if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
        ctx->SetStatus(StatusOf(outcome));
        for (size_t i = 0; outcome.kind == Outcome::kDone && i < tensors->outputs.size(); ++i) {
          ctx->set_output(static_cast<int>(i), tensors->outputs[i]);
        }
        done();
      });
    };
    engine.Submit(std::move(request));
    // The op may have ended by now. A callback that came before Submit found no request.
    if (*cancelled) engine.Cancel(id, why);
  }

  const RankGroup* group_;
  std::string key_;
};

absl::Status CheckHasRows(const Tensor& tensor) {
  if (tensor.dims() > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("the tensor must have a first axis. Received: a scalar");
}

// Allocates the outputs of an exchange: the rows of all ranks, and how many each has sent. The request
// keeps `tensors`.
std::function<char*(const std::vector<int64_t>&)> RowsOfAll(OpKernelContext* ctx,
                                                            Tensors* tensors) {
  auto* const allocator = ctx->device()->GetAllocator(tensorflow::AllocatorAttributes());
  const bool with_lengths = ctx->num_outputs() > 1;
  return [allocator, tensors, with_lengths](const std::vector<int64_t>& rows) {
    Tensor lengths(tensorflow::DT_INT32, TensorShape({static_cast<int64_t>(rows.size())}));
    int64_t total = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      lengths.flat<int32_t>()(r) = static_cast<int32_t>(rows[r]);
      total += rows[r];
    }
    const Tensor& data = tensors->input;
    tensors->outputs.push_back(Allocated(allocator, data.dtype(), WithRows(data, total)));
    if (with_lengths) tensors->outputs.push_back(lengths);
    return Bytes(tensors->outputs[0]);
  };
}

class AllToAllOp : public RequestOp {
 public:
  using RequestOp::RequestOp;
  absl::Status Prepare(OpKernelContext* ctx, const std::shared_ptr<Tensors>& tensors,
                       std::unique_ptr<Request>* request) override {
    const Tensor& data = tensors->input;
    const Tensor& splits = ctx->input(1);
    TF_RETURN_IF_ERROR(CheckHasRows(data));
    if (splits.NumElements() != size()) {
      return absl::InvalidArgumentError("`splits` must have an element for each of " +
                                        std::to_string(size()) +
                                        " ranks. Received: " + splits.shape().DebugString());
    }
    auto exchange = std::make_unique<Exchange>();
    exchange->row_bytes = RowElements(data) * DataTypeSize(data.dtype());
    int64_t begin = 0;
    for (int r = 0; r < size(); ++r) {
      const int64_t rows = splits.flat<int32_t>()(r);
      if (rows < 0) return absl::InvalidArgumentError("`splits` must not be negative");
      exchange->rows.push_back(rows);
      exchange->blocks.push_back(Bytes(data) + begin * exchange->row_bytes);
      begin += rows;
    }
    if (begin != data.dim_size(0)) {
      return absl::InvalidArgumentError("`splits` must sum up to the length of the tensor, " +
                                        std::to_string(data.dim_size(0)) +
                                        ". Received: " + splits.DebugString(size()));
    }
    exchange->allocate = RowsOfAll(ctx, tensors.get());
    *request = std::move(exchange);
    return absl::OkStatus();
  }
};

class AllGatherOp : public RequestOp {
 public:
  using RequestOp::RequestOp;
  absl::Status Prepare(OpKernelContext* ctx, const std::shared_ptr<Tensors>& tensors,
                       std::unique_ptr<Request>* request) override {
    const Tensor& data = tensors->input;
    TF_RETURN_IF_ERROR(CheckHasRows(data));
    auto exchange = std::make_unique<Exchange>();
    exchange->row_bytes = RowElements(data) * DataTypeSize(data.dtype());
    exchange->rows.assign(size(), data.dim_size(0));
    exchange->blocks.assign(size(), Bytes(data));
    exchange->allocate = RowsOfAll(ctx, tensors.get());
    *request = std::move(exchange);
    return absl::OkStatus();
  }
};

// What the collectives of MPI have in common; all ranks give the same shape.
class CollectiveOp : public RequestOp {
 public:
  using RequestOp::RequestOp;
  absl::Status Prepare(OpKernelContext* ctx, const std::shared_ptr<Tensors>& tensors,
                       std::unique_ptr<Request>* request) override {
    const Tensor& data = tensors->input;
    auto collective = std::make_unique<Collective>();
    collective->row_bytes = DataTypeSize(data.dtype());
    collective->type = TypeOf(data.dtype());
    collective->count = data.NumElements();
    collective->in = Bytes(data);
    Tensor output;
    TF_RETURN_IF_ERROR(Choose(ctx, data, collective.get(), &output));
    collective->out = Bytes(output);
    tensors->outputs.push_back(output);
    *request = std::move(collective);
    return absl::OkStatus();
  }

 protected:
  virtual absl::Status Choose(OpKernelContext* ctx, const Tensor& data, Collective* collective,
                              Tensor* output) {
    return ctx->allocate_temp(data.dtype(), data.shape(), output);
  }
};

class ReduceScatterOp : public CollectiveOp {
 public:
  using CollectiveOp::CollectiveOp;

 protected:
  absl::Status Choose(OpKernelContext* ctx, const Tensor& data, Collective* collective,
                      Tensor* output) override {
    TF_RETURN_IF_ERROR(CheckHasRows(data));
    collective->kind = Collective::kScatteredSum;
    const int64_t rows = data.dim_size(0), width = RowElements(data);
    for (int r = 0; r < size(); ++r) {
      const int64_t own = rows / size() + (r < rows % size() ? 1 : 0);
      collective->parts.push_back(own * width);
      if (r == group().me) {
        TF_RETURN_IF_ERROR(ctx->allocate_temp(data.dtype(), WithRows(data, own), output));
      }
    }
    return absl::OkStatus();
  }
};

class BroadcastOp : public CollectiveOp {
 public:
  explicit BroadcastOp(OpKernelConstruction* ctx) : CollectiveOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("root", &root_));
    OP_REQUIRES(ctx, 0 <= root_ && root_ < size(),
                absl::InvalidArgumentError("`root_rank` must be a rank of the group, of " +
                                           std::to_string(size()) +
                                           ". Received: " + std::to_string(root_)));
  }

 protected:
  absl::Status Choose(OpKernelContext* ctx, const Tensor& data, Collective* collective,
                      Tensor* output) override {
    collective->kind = Collective::kBroadcast;
    collective->root = root_;
    *output = data;
    if (group().me == root_) return absl::OkStatus();
    return ctx->allocate_temp(data.dtype(), data.shape(), output);
  }

 private:
  int root_;
};

absl::Status AnyRows(InferenceContext* ctx) {
  ShapeHandle shape;
  TF_RETURN_IF_ERROR(ctx->WithRankAtLeast(ctx->input(0), 1, &shape));
  TF_RETURN_IF_ERROR(
      ctx->ReplaceDim(shape, 0, ctx->MakeDim(InferenceContext::kUnknownDim), &shape));
  ctx->set_output(0, shape);
  if (ctx->num_outputs() > 1) ctx->set_output(1, ctx->input(1));
  return absl::OkStatus();
}

}  // namespace

// Stateful, so that no rank computes one of constants by itself.
REGISTER_OP("SokMpiAllToAll")
    .Input("data: T")
    .Input("splits: int32")
    .Output("received: T")
    .Output("lengths: int32")
    .Attr("T: type")
    .Attr("key: string = ''")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(AnyRows)
    .Doc("Sends the next splits[r] rows to rank r. An empty key stands for the op's own name.");
REGISTER_KERNEL_BUILDER(Name("SokMpiAllToAll").Device(tensorflow::DEVICE_CPU), AllToAllOp);

REGISTER_OP("SokMpiAllGather")
    .Input("data: T")
    .Output("gathered: T")
    .Attr("T: type")
    .Attr("key: string = ''")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(AnyRows)
    .Doc("The rows of all ranks, in rank order.");
REGISTER_KERNEL_BUILDER(Name("SokMpiAllGather").Device(tensorflow::DEVICE_CPU), AllGatherOp);

REGISTER_OP("SokMpiSum")
    .Input("data: T")
    .Output("sum: T")
    .Attr("T: {float, double, int32, int64}")
    .Attr("key: string = ''")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The sum of the ranks' tensors, by MPI_Iallreduce.");
REGISTER_KERNEL_BUILDER(Name("SokMpiSum").Device(tensorflow::DEVICE_CPU), CollectiveOp);

REGISTER_OP("SokMpiReduceScatter")
    .Input("data: T")
    .Output("part: T")
    .Attr("T: {float, double, int32, int64}")
    .Attr("key: string = ''")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(AnyRows)
    .Doc("This rank's rows of the sum, by MPI_Ireduce; the first parts may be longer.");
REGISTER_KERNEL_BUILDER(Name("SokMpiReduceScatter").Device(tensorflow::DEVICE_CPU),
                        ReduceScatterOp);

REGISTER_OP("SokMpiBroadcast")
    .Input("data: T")
    .Output("result: T")
    .Attr("T: type")
    .Attr("root: int")
    .Attr("key: string = ''")
    .Attr("group: int = 0")
    .SetIsStateful()
    .SetIsDistributedCommunication()
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The tensor as it is on rank `root` of the group, by MPI_Ibcast.");
REGISTER_KERNEL_BUILDER(Name("SokMpiBroadcast").Device(tensorflow::DEVICE_CPU), BroadcastOp);

}  // namespace sok
