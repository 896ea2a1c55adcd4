// Messages in rounds: SokTakePart =exchange=> SokJoinParts (parts.h).
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/parts.h"

namespace sok {

absl::Status PartShapes(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->input(1));
  return absl::OkStatus();
}

absl::Status TakePart(OpKernelContext* ctx, WriteMessage write) {
  const Tensor &message = ctx->input(0), &splits = ctx->input(1);
  TF_RETURN_IF_ERROR(CheckSplits(message, splits, splits.NumElements()));
  const int32_t round = ctx->input(2).scalar<int32_t>()();
  const std::vector<int32_t> lengths = ValuesOf<int32_t>(splits);
  const int64_t share = WordsOfRound(lengths.size()), begin = round * share;
  std::vector<int32_t> taken;
  std::vector<int64_t> heads;
  std::vector<Piece> pieces;
  const float* from = message.flat<float>().data();
  int64_t num_words = 0, longest = 0;
  for (const int64_t length : lengths) {
    const int64_t count = std::clamp<int64_t>(length - begin, 0, share);
    taken.push_back(count);
    if (round == 0) heads.push_back(num_words);
    if (count > 0) pieces.push_back({from + begin, num_words, count});
    num_words += count;
    from += length;
    longest = std::max(longest, length);
  }
  TF_RETURN_IF_ERROR(SetVector(ctx, 1, taken));
  if (num_words == message.NumElements()) {
    ctx->set_output(0, message);
    return absl::OkStatus();
  }
  Tensor* part;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({num_words}), &part));
  const int64_t rounds = (longest + share - 1) / share;
  return write(ctx, pieces, heads, std::max<int64_t>(rounds - 1 - round, 0), part);
}

absl::Status JoinParts(OpKernelContext* ctx, WriteMessage write) {
  const Tensor &message = ctx->input(0), &splits = ctx->input(1);
  const Tensor &part = ctx->input(2), &part_splits = ctx->input(3);
  TF_RETURN_IF_ERROR(CheckSplits(message, splits, splits.NumElements()));
  TF_RETURN_IF_ERROR(CheckSplits(part, part_splits, splits.NumElements()));
  const std::vector<int32_t> blocks = ValuesOf<int32_t>(splits),
                             parts = ValuesOf<int32_t>(part_splits);
  std::vector<int32_t> lengths;
  std::vector<int64_t> heads;
  std::vector<Piece> pieces;
  const float *block = message.flat<float>().data(), *next = part.flat<float>().data();
  int64_t num_words = 0;
  for (size_t r = 0; r < blocks.size(); ++r) {
    heads.push_back(num_words);
    pieces.push_back({block, num_words, blocks[r]});
    pieces.push_back({next, num_words + blocks[r], parts[r]});
    lengths.push_back(blocks[r] + parts[r]);
    num_words += lengths.back();
    block += blocks[r];
    next += parts[r];
  }
  TF_RETURN_IF_ERROR(SetVector(ctx, 1, lengths));
  Tensor* joined;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({num_words}), &joined));
  return write(ctx, pieces, heads, 0, joined);
}

namespace {

absl::Status WriteOnHost(OpKernelContext*, const std::vector<Piece>& pieces,
                         const std::vector<int64_t>& heads, int32_t more_rounds, Tensor* message) {
  float* const to = message->flat<float>().data();
  for (const Piece& piece : pieces) {
    if (piece.count > 0) std::memcpy(to + piece.to, piece.from, piece.count * sizeof(float));
  }
  for (const int64_t head : heads) {
    std::memcpy(to + head + kRoundsWord, &more_rounds, sizeof(more_rounds));
  }
  return absl::OkStatus();
}

REGISTER_OP("SokTakePart")
    .Input("message: float")
    .Input("splits: int32")
    .Input("round: int32")
    .Output("part: float")
    .Output("part_splits: int32")
    .SetIsStateful()  // so that it is not folded beforehand: Horovod's op must run on all ranks
    .SetShapeFn(PartShapes)
    .Doc(
        "What of a message travels in a round, counted from 0: all of it where one round is "
        "enough.");

absl::Status TakeHostPart(OpKernelContext* ctx) { return TakePart(ctx, WriteOnHost); }
REGISTER_KERNEL_BUILDER(Name("SokTakePart").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<TakeHostPart>);

REGISTER_OP("SokJoinParts")
    .Input("message: float")
    .Input("splits: int32")
    .Input("part: float")
    .Input("part_splits: int32")
    .Output("joined: float")
    .Output("joined_splits: int32")
    .SetShapeFn(PartShapes)
    .Doc("What was received so far with what the next round has brought.");

absl::Status JoinHostParts(OpKernelContext* ctx) { return JoinParts(ctx, WriteOnHost); }
REGISTER_KERNEL_BUILDER(Name("SokJoinParts").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<JoinHostParts>);

REGISTER_OP("SokCheckBlocks")
    .Input("words: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Raises unless every rank can send as many words of 4 bytes to another.");

absl::Status CheckBlocks(OpKernelContext* ctx) {
  const auto words = ctx->input(0).flat<int64_t>();
  for (int64_t r = 0; r < words.size(); ++r) {
    const absl::Status status = BlockFits(words(r), sizeof(float));
    if (!status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", r, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokCheckBlocks").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<CheckBlocks>);

}  // namespace
}  // namespace sok
