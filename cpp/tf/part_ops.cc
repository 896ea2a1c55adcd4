// Messages in rounds: SokTakePart =exchange=> SokJoinParts (parts.h).
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/parts.h"

namespace sok {

Part PartOf(const std::vector<int32_t>& lengths, int64_t round) {
  Part part;
  const int64_t share = WordsOfRound(lengths.size()), begin = round * share;
  int64_t from = 0, longest = 0;
  for (const int64_t length : lengths) {
    const int64_t count = std::clamp<int64_t>(length - begin, 0, share);
    part.lengths.push_back(count);
    part.starts.push_back(part.num_words);
    if (count > 0) part.pieces.push_back({from + begin, part.num_words, count});
    part.num_words += count;
    from += length;
    longest = std::max(longest, length);
  }
  part.more_rounds = std::max<int64_t>((longest + share - 1) / share - 1 - round, 0);
  return part;
}

Joined Join(const std::vector<int32_t>& blocks, const std::vector<int32_t>& parts) {
  Joined joined;
  int64_t from_block = 0, from_part = 0;
  for (size_t r = 0; r < blocks.size(); ++r) {
    joined.starts.push_back(joined.num_words);
    joined.of_blocks.push_back({from_block, joined.num_words, blocks[r]});
    joined.of_parts.push_back({from_part, joined.num_words + blocks[r], parts[r]});
    joined.lengths.push_back(blocks[r] + parts[r]);
    joined.num_words += joined.lengths.back();
    from_block += blocks[r];
    from_part += parts[r];
  }
  return joined;
}

namespace {

void Copy(const std::vector<Piece>& pieces, const float* from, float* to) {
  for (const Piece& piece : pieces) {
    if (piece.count == 0) continue;
    std::memcpy(to + piece.to, from + piece.from, piece.count * sizeof(float));
  }
}

void SetMoreRounds(const std::vector<int64_t>& starts, int32_t more_rounds, float* message) {
  for (const int64_t start : starts) {
    std::memcpy(message + start + kRoundsWord, &more_rounds, sizeof(more_rounds));
  }
}

absl::Status PartShapes(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->input(1));
  return absl::OkStatus();
}

}  // namespace

absl::Status SetLengths(OpKernelContext* ctx, const std::vector<int32_t>& lengths) {
  Tensor* splits;
  const int64_t world_size = lengths.size();
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({world_size}), &splits));
  std::copy(lengths.begin(), lengths.end(), splits->flat<int32_t>().data());
  return absl::OkStatus();
}

std::vector<int32_t> LengthsOf(const Tensor& splits) {
  const int32_t* const lengths = splits.flat<int32_t>().data();
  return {lengths, lengths + splits.NumElements()};
}

REGISTER_OP("SokTakePart")
    .Input("message: float")
    .Input("splits: int32")
    .Input("round: int32")
    .Output("part: float")
    .Output("part_splits: int32")
    .SetIsStateful()  // so that nothing computes it beforehand: Horovod's op must run on all ranks
    .SetShapeFn(PartShapes)
    .Doc(
        "What of a message travels in a round, counted from 0: all of it where one round is "
        "enough.");

class TakePartOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    const int32_t round = ctx->input(2).scalar<int32_t>()();
    const Part part = PartOf(LengthsOf(splits), round);
    OP_REQUIRES_OK(ctx, SetLengths(ctx, part.lengths));
    if (part.num_words == message.NumElements()) {
      ctx->set_output(0, message);
      return;
    }
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({part.num_words}), &out));
    Copy(part.pieces, message.flat<float>().data(), out->flat<float>().data());
    if (round == 0) SetMoreRounds(part.starts, part.more_rounds, out->flat<float>().data());
  }
};
REGISTER_KERNEL_BUILDER(Name("SokTakePart").Device(tensorflow::DEVICE_CPU), TakePartOp);

REGISTER_OP("SokJoinParts")
    .Input("message: float")
    .Input("splits: int32")
    .Input("part: float")
    .Input("part_splits: int32")
    .Output("joined: float")
    .Output("joined_splits: int32")
    .SetShapeFn(PartShapes)
    .Doc("What was received so far with what the next round has brought.");

class JoinPartsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &message = ctx->input(0), &splits = ctx->input(1);
    const Tensor &part = ctx->input(2), &part_splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, splits.NumElements()));
    OP_REQUIRES_OK(ctx, CheckSplits(part, part_splits, splits.NumElements()));
    const Joined joined = Join(LengthsOf(splits), LengthsOf(part_splits));
    OP_REQUIRES_OK(ctx, SetLengths(ctx, joined.lengths));
    Tensor* out;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({joined.num_words}), &out));
    Copy(joined.of_blocks, message.flat<float>().data(), out->flat<float>().data());
    Copy(joined.of_parts, part.flat<float>().data(), out->flat<float>().data());
    SetMoreRounds(joined.starts, 0, out->flat<float>().data());
  }
};
REGISTER_KERNEL_BUILDER(Name("SokJoinParts").Device(tensorflow::DEVICE_CPU), JoinPartsOp);

REGISTER_OP("SokCheckBlocks")
    .Input("words: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc("Raises unless every rank can send as many words of 4 bytes to another.");

class CheckBlocksOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    const auto words = ctx->input(0).flat<int64_t>();
    for (int64_t r = 0; r < words.size(); ++r) {
      const absl::Status status = BlockFits(words(r), sizeof(float));
      OP_REQUIRES(ctx, status.ok(),
                  absl::InvalidArgumentError(absl::StrCat("rank ", r, ": ", status.message())));
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("SokCheckBlocks").Device(tensorflow::DEVICE_CPU), CheckBlocksOp);

}  // namespace sok
