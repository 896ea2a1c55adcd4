// Row messages whose floats travel in 16 bits: SokNarrowRows =exchange=> SokWidenRows.
//
//     block          [head | float | float | ..]
//     narrow block   [head | number of floats | two numbers of 16 bits | two numbers | ..]
//
// The head says which type of 16 bits it is (message.h). Both kinds of message consist of words of
// 4 bytes and begin with a head, so rounds and checks are the same for both. A failed block, and
// one whose head says float32, travel unchanged.
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/parts.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 1 << 15;  // floats

// The words of a narrow block where the number of floats is, and where the 16-bit numbers begin.
constexpr int64_t kFloatsWord = kHeadWords<float>, kHalves = kFloatsWord + 1;

int64_t NarrowWords(int64_t floats) { return kHalves + (floats + 1) / 2; }

// The number of floats in a narrow block; -1 if its length does not fit.
int32_t FloatsIn(const float* narrow, int64_t words) {
  int32_t floats = -1;
  if (words >= kHalves) std::memcpy(&floats, narrow + kFloatsWord, sizeof(floats));
  return floats >= 0 && NarrowWords(floats) == words ? floats : -1;
}

// Whether a block's floats travel in 16 bits.
bool IsConverted(const float* block, int64_t words) {
  if (words < kHeadWords<float>) return false;
  const Call head = ReadHead(block);
  return head.wire() != Wire::kFloat32 && static_cast<uint32_t>(head.words[0]) == 0;
}

template <typename T>
using Numbers = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
template <typename T>
using ConstNumbers = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;

// Casts numbers, rounding to nearest even.
template <typename From, typename To>
void Cast(Executor& ex, const float* from, int64_t n, float* to) {
  ex.ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    const From* const source = reinterpret_cast<const From*>(from) + begin;
    To* const target = reinterpret_cast<To*>(to) + begin;
    Numbers<To>(target, end - begin) = ConstNumbers<From>(source, end - begin).template cast<To>();
  });
}

// The least float that rounding to nearest even makes infinite.
float LeastTooLarge(Wire wire) { return wire == Wire::kFloat16 ? 65520.0f : 0x1.ffp127f; }

bool IsTooLarge(float value, float least) {
  return std::abs(value) >= least && std::abs(value) <= FLT_MAX;
}

bool AnyTooLarge(Executor& ex, const float* values, int64_t n, float least) {
  std::atomic<bool> found{false};
  ex.ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    int any = 0;
    for (int64_t i = begin; i < end; ++i) any |= IsTooLarge(values[i], least) ? 1 : 0;
    if (any != 0) found = true;
  });
  return found;
}

absl::Status Unfit(const Call& call, const float* values, float least) {
  while (!IsTooLarge(*values, least)) ++values;
  return absl::InvalidArgumentError(absl::StrCat(
      "the ", call.ToString(), " ", kUnfitForWire, " -", least, " and ", least, ". Received: ",
      *values, call.wire() == Wire::kFloat16 ? "; wire_dtype='bfloat16' can hold it" : ""));
}

// Sets outputs 0 and 1 to the message and its splits, with each block for which IsConverted holds
// replaced by convert(from, words, to). It then has new_words(from, words) words, which are fewer
// than a head if the block is malformed.
template <typename NewWords, typename Convert>
absl::Status ConvertBlocks(OpKernelContext* ctx, NewWords new_words, Convert convert) {
  const Tensor &message = ctx->input(0), &splits = ctx->input(1);
  TF_RETURN_IF_ERROR(CheckSplits(message, splits, splits.NumElements()));
  std::vector<int32_t> lengths = ValuesOf<int32_t>(splits), converted = lengths;
  const float* from = message.flat<float>().data();
  int64_t total = 0;
  for (int32_t& words : converted) {
    const int32_t before = words;
    if (IsConverted(from, before)) words = new_words(from, before);
    if (words < kHeadWords<float> && words != before) {
      return absl::InvalidArgumentError(
          absl::StrCat("a narrow block must have the length that its number of floats requires. "
                       "Received: ",
                       before, " words"));
    }
    total += words;
    from += before;
  }
  Tensor out;
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_FLOAT, TensorShape({total}), &out));
  from = message.flat<float>().data();
  float* to = out.flat<float>().data();
  for (size_t r = 0; r < lengths.size(); ++r) {
    if (IsConverted(from, lengths[r])) {
      std::copy_n(from, kHeadWords<float>, to);
      TF_RETURN_IF_ERROR(convert(from, lengths[r], to));
    } else {
      std::copy_n(from, lengths[r], to);
    }
    from += lengths[r];
    to += converted[r];
  }
  ctx->set_output(0, out);
  return SetVector(ctx, 1, converted);
}

}  // namespace

REGISTER_OP("SokNarrowRows")
    .Input("message: float")
    .Input("splits: int32")
    .Output("narrow: float")
    .Output("narrow_splits: int32")
    .SetShapeFn(PartShapes)
    .Doc(
        "A row message with floats rounded to the 16 bits that its heads name. A number that "
        "becomes infinite by it is this rank's failure.");

class NarrowRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TfExecutor ex(ctx);
    const Tensor& message = ctx->input(0);
    OP_REQUIRES(ctx, message.NumElements() >= kHeadWords<float>,
                absl::InvalidArgumentError("a message must begin with a head"));
    const Call call = ReadHead(message.flat<float>().data());
    const float least = LeastTooLarge(call.wire());
    const absl::Status status = ConvertBlocks(
        ctx, [](const float*, int64_t words) { return NarrowWords(words - kHeadWords<float>); },
        [&](const float* from, int64_t words, float* to) {
          const float* const floats = from + kHeadWords<float>;
          const int32_t n = words - kHeadWords<float>;
          if (AnyTooLarge(ex, floats, n, least)) return Unfit(call, floats, least);
          to[NarrowWords(n) - 1] = 0;  // may be half used
          std::memcpy(to + kFloatsWord, &n, sizeof(n));
          call.wire() == Wire::kFloat16 ? Cast<float, Eigen::half>(ex, floats, n, to + kHalves)
                                        : Cast<float, Eigen::bfloat16>(ex, floats, n, to + kHalves);
          return absl::OkStatus();
        });
    if (!status.ok()) {
      OP_REQUIRES_OK(ctx, FailAll<float>(ctx, status, call, ctx->input(1).NumElements()));
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("SokNarrowRows").Device(tensorflow::DEVICE_CPU), NarrowRowsOp);

REGISTER_OP("SokWidenRows")
    .Input("narrow: float")
    .Input("narrow_splits: int32")
    .Output("message: float")
    .Output("splits: int32")
    .SetShapeFn(PartShapes)
    .Doc("The row message that SokNarrowRows has rounded, in floats.");

class WidenRowsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    TfExecutor ex(ctx);
    OP_REQUIRES_OK(ctx, ConvertBlocks(
                            ctx,
                            [](const float* from, int64_t words) {
                              return kHeadWords<float> + FloatsIn(from, words);
                            },
                            [&](const float* from, int64_t words, float* to) {
                              const int64_t n = FloatsIn(from, words);
                              float* const floats = to + kHeadWords<float>;
                              ReadHead(from).wire() == Wire::kFloat16
                                  ? Cast<Eigen::half, float>(ex, from + kHalves, n, floats)
                                  : Cast<Eigen::bfloat16, float>(ex, from + kHalves, n, floats);
                              return absl::OkStatus();
                            }));
  }
};
REGISTER_KERNEL_BUILDER(Name("SokWidenRows").Device(tensorflow::DEVICE_CPU), WidenRowsOp);

}  // namespace sok
