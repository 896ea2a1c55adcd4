#include "cpp/tf/messages.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "absl/strings/str_cat.h"

namespace sok {

namespace {

// 2^31 - 1, or less if the environment says so.
int64_t Limit(const char* variable) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  const char* const text = std::getenv(variable);
  const int64_t lowered = text == nullptr ? 0 : std::atoll(text);
  return lowered > 0 ? std::min(lowered, kLimit) : kLimit;
}

}  // namespace

absl::Status BlockFits(int64_t words, size_t word_size) {
  static const int64_t limit = Limit("SOK_BLOCK_LIMIT");
  const int64_t sent = words * (word_size / sizeof(float));
  if (sent <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the message from one rank to another may have at most ", limit,
                   " words of 4 bytes per exchange. Received: ", sent, "; use a smaller batch"));
}

int64_t WordsOfRound(int64_t world_size) {
  static const int64_t limit = Limit("SOK_EXCHANGE_LIMIT");
  return std::max(limit / world_size, kHeadWords<float>);  // heads are never split
}

absl::Status SetMessageShapes(InferenceContext* c) {
  int world_size;
  TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Vector(world_size));
  return absl::OkStatus();
}

absl::Status CheckSplits(const Tensor& message, const Tensor& splits, int64_t world_size) {
  int64_t total = 0;
  for (int64_t r = 0; r < splits.NumElements(); ++r) total += splits.flat<int32_t>()(r);
  if (splits.NumElements() == world_size && total == message.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "splits must hold ", world_size, " lengths that add up to the message's ",
      message.NumElements(), ". Received: ", splits.NumElements(), " adding up to ", total));
}

absl::Status RaisedByRank(const std::function<void()>& fn) { return RaisedByRank(Guard(fn)); }

absl::Status RaisedByRank(const absl::Status& status) {
  if (absl::IsInternal(status)) return absl::InvalidArgumentError(status.message());
  return status;
}

absl::Status ParseKeys(const tensorflow::Tensor& message, const tensorflow::Tensor& splits,
                       int64_t world_size, int64_t num_tables, Segments* segments) {
  TF_RETURN_IF_ERROR(CheckSplits(message, splits, world_size));
  const int64_t* const words = message.flat<int64_t>().data();
  const int32_t* const lengths = splits.flat<int32_t>().data();
  const absl::Status status =
      RaisedByRank([&] { *segments = ParseKeyMessage(words, lengths, world_size, num_tables); });
  if (absl::IsFailedPrecondition(status)) CatchUpWith(words, lengths, world_size);
  return status;
}

absl::Status CutByHeads(const Tensor& heads, const Tensor& message, const Tensor& splits,
                        int64_t world_size, int64_t num_tables, Segments* segments) {
  const int64_t num_words = kHeadWords<int64_t> + num_tables;
  if (heads.shape() != TensorShape({world_size, num_words})) {
    return absl::InvalidArgumentError(absl::StrCat("heads must have the shape [", world_size, ", ",
                                                   num_words, "]. Received: heads of shape ",
                                                   heads.shape().DebugString()));
  }
  std::vector<const int64_t*> of_rank;
  for (int64_t r = 0; r < world_size; ++r) {
    of_rank.push_back(heads.flat<int64_t>().data() + r * num_words);
  }
  return Guard([&] {
    *segments = CutKeyMessage(of_rank, message.flat<int64_t>().data(),
                              splits.flat<int32_t>().data(), num_tables);
  });
}

absl::Status SetCall(tensorflow::OpKernelContext* ctx, const float* message, const int32_t* splits,
                     int64_t world_size) {
  const absl::Status status = RaisedByRank([&] { ThrowIfOutOfStep(message, splits, world_size); });
  if (absl::IsFailedPrecondition(status)) CatchUpWith(message, splits, world_size);
  TF_RETURN_IF_ERROR(status);
  const int32_t more_rounds = MoreRounds(message, splits, world_size);
  if (more_rounds == 0) TF_RETURN_IF_ERROR(RaiseFailure(message, splits, world_size));
  const Call first = ReadHead(message), call = first.At(first.stage());  // without a failure
  TF_RETURN_IF_ERROR(SetVector(ctx, 0, std::vector<int64_t>(call.words.begin(), call.words.end())));
  return SetScalar(ctx, 1, more_rounds);
}

absl::Status GetCall(tensorflow::OpKernelContext* ctx, Call* call) {
  const tensorflow::Tensor* words;
  TF_RETURN_IF_ERROR(ctx->input("call", &words));
  if (words->NumElements() != Call::kNumWords) {
    return absl::InvalidArgumentError(absl::StrCat("call must hold ", Call::kNumWords,
                                                   " words. Received: ", words->NumElements()));
  }
  *call = ReadHead(words->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status FirstProblem(tensorflow::OpKernelContext* ctx) {
  tensorflow::OpInputList problems;
  TF_RETURN_IF_ERROR(ctx->input_list("problems", &problems));
  for (const Tensor& problem : problems) {
    const tensorflow::tstring& text = problem.scalar<tensorflow::tstring>()();
    if (!text.empty()) return absl::InvalidArgumentError(std::string(text));
  }
  return absl::OkStatus();
}

absl::Status OutputMessage::Allocate(OpKernelContext* ctx, const std::vector<int64_t>& words) {
  const tensorflow::DataType type = ctx->expected_output_dtype(0);
  int64_t total = 0;
  for (const int64_t of_rank : words) {
    TF_RETURN_IF_ERROR(BlockFits(of_rank, tensorflow::DataTypeSize(type)));
    total += of_rank;
  }
  TF_RETURN_IF_ERROR(
      ctx->allocate_temp(type, TensorShape({total}), &message, ctx->output_alloc_attr(0)));
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT32,
                                        TensorShape({static_cast<int64_t>(words.size())}), &splits,
                                        ctx->output_alloc_attr(1)));
  std::copy(words.begin(), words.end(), splits.flat<int32_t>().data());
  return absl::OkStatus();
}

void OutputMessage::Set(OpKernelContext* ctx) const {
  ctx->set_output(0, message);
  ctx->set_output(1, splits);
}

StampOp::StampOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
  tensorflow::DataType wire;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("lookup", &lookup_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("line", &line_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("stage", &stage_));
  OP_REQUIRES_OK(ctx, ctx->GetAttr("wire_dtype", &wire));
  wire_ = wire == tensorflow::DT_BFLOAT16 ? Wire::kBfloat16
          : wire == tensorflow::DT_HALF   ? Wire::kFloat16
                                          : Wire::kFloat32;
}

}  // namespace sok
