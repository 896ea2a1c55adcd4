// Compares digests of the batches that ranks got (sok_like/distribution/model.py).
//
//     of a rank    shard | two words of tensor 0 | .. of tensor 1 | ..
//
//     integers, texts    hash                                | 0
//     floats             their sum with different weights    | their L2 norm        bits of float64
//
// Two ops, because a traced step would hold a hundred of TensorFlow's ops in their place.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/base/casts.h"
#include "absl/strings/str_cat.h"
#include "cpp/core/hash.h"
#include "cpp/tf/common.h"

namespace sok {

namespace {

using Digest = std::array<int64_t, 2>;

// All weights differ, so that another order gives another sum: a Weyl sequence in [1, 2).
template <typename T>
Digest DigestFloats(const Tensor& tensor) {
  const auto values = tensor.flat<T>();
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < values.size(); ++i) {
    const uint64_t place = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ull;
    const double value = static_cast<double>(values(i));
    sum += value * (1.0 + static_cast<double>(place >> 11) * 0x1p-53);
    squares += value * value;
  }
  return {{absl::bit_cast<int64_t>(sum), absl::bit_cast<int64_t>(std::sqrt(squares))}};
}

// One step per eight bytes, each a bijection: bytes that differ in one word never hash alike.
uint64_t HashOnto(uint64_t hash, absl::string_view bytes) {
  hash = HashKey(hash ^ bytes.size());
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min(sizeof(word), bytes.size() - at));
    hash = HashKey(hash ^ word);
  }
  return hash;
}

Digest DigestExactly(const Tensor& tensor) {
  uint64_t hash = 0;
  if (tensor.dtype() == tensorflow::DT_STRING) {
    const auto texts = tensor.flat<tensorflow::tstring>();
    for (int64_t i = 0; i < texts.size(); ++i) hash = HashOnto(hash, texts(i));
  } else {
    hash = HashOnto(hash, tensor.tensor_data());
  }
  return {{static_cast<int64_t>(hash), 0}};
}

Digest DigestOf(const Tensor& tensor) {
  switch (tensor.dtype()) {
    case tensorflow::DT_DOUBLE:
      return DigestFloats<double>(tensor);
    case tensorflow::DT_FLOAT:
      return DigestFloats<float>(tensor);
    case tensorflow::DT_HALF:
      return DigestFloats<Eigen::half>(tensor);
    case tensorflow::DT_BFLOAT16:
      return DigestFloats<tensorflow::bfloat16>(tensor);
    default:
      return DigestExactly(tensor);
  }
}

bool Equal(const int64_t* a, const int64_t* b, bool floats, double tolerance) {
  if (a[0] == b[0] && a[1] == b[1]) return true;
  if (!floats) return false;
  const double x = absl::bit_cast<double>(a[0]), y = absl::bit_cast<double>(b[0]);
  if (!std::isfinite(x) && !std::isfinite(y)) return true;
  const double norm = std::max(absl::bit_cast<double>(a[1]), absl::bit_cast<double>(b[1]));
  return std::abs(x - y) <= tolerance * norm;
}

}  // namespace

REGISTER_OP("SokDigestBatch")
    .Input("tensors: types")
    .Output("digests: int64")
    .Attr("types: list(type) >= 0")
    .Attr("shard: int")
    .SetShapeFn([](InferenceContext* c) { return SetShapes(c, {{1 + 2 * c->num_inputs()}}); })
    .Doc(
        "int64 [1 + 2 * tensors]: the shard of the batch that this rank reads, and two per "
        "tensor.");

class DigestBatchOp : public OpKernel {
 public:
  explicit DigestBatchOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("shard", &shard_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<int64_t> digests = {shard_};
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Digest digest = DigestOf(ctx->input(i));
      digests.insert(digests.end(), digest.begin(), digest.end());
    }
    OP_REQUIRES_OK(ctx, SetVector(ctx, 0, digests));
  }

 private:
  int64_t shard_;
};
REGISTER_KERNEL_BUILDER(Name("SokDigestBatch").Device(tensorflow::DEVICE_CPU), DigestBatchOp);

REGISTER_OP("SokCompareBatches")
    .Input("digests: int64")
    .Input("lengths: int32")
    .Attr("names: list(string)")
    .Attr("floats: list(bool)")
    .Attr("tolerance: float")
    .SetIsStateful()  // it may raise, so it must run
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(
        "Raises if two ranks that read the same shard have different digests. digests and lengths "
        "hold those of all ranks, in rank order.");

class CompareBatchesOp : public OpKernel {
 public:
  explicit CompareBatchesOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("names", &names_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("floats", &floats_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("tolerance", &tolerance_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &digests = ctx->input(0), &lengths = ctx->input(1);
    const int64_t width = 1 + 2 * static_cast<int64_t>(names_.size());
    for (int64_t r = 0; r < lengths.NumElements(); ++r) {
      OP_REQUIRES(
          ctx, lengths.flat<int32_t>()(r) == width,
          absl::InvalidArgumentError(absl::StrCat(
              "Every rank must get the same batches. Received: on rank ", r, " ",
              (lengths.flat<int32_t>()(r) - 1) / 2, " tensors, on this rank ", names_.size())));
    }
    const int64_t* const of_rank_0 = digests.flat<int64_t>().data();
    for (int64_t rank = 1; rank < lengths.NumElements(); ++rank) {
      const int64_t* const of_rank = of_rank_0 + rank * width;
      int64_t first = 0;  // the first rank that reads the same shard
      while (of_rank_0[first * width] != of_rank[0]) ++first;
      for (int64_t i = 0; i < static_cast<int64_t>(names_.size()); ++i) {
        OP_REQUIRES(
            ctx,
            Equal(of_rank + 1 + 2 * i, of_rank_0 + first * width + 1 + 2 * i, floats_[i],
                  tolerance_),
            absl::InvalidArgumentError(absl::StrCat(
                "Every rank must get the same batches: a distribution splits them itself. "
                "Received: on rank ",
                rank, " other values than on rank ", first, " in ", names_[i],
                ". To read the same batches on all ranks, omit `shard` and give `shuffle` the "
                "same seed")));
      }
    }
  }

 private:
  std::vector<std::string> names_;
  std::vector<bool> floats_;
  float tolerance_;
};
REGISTER_KERNEL_BUILDER(Name("SokCompareBatches").Device(tensorflow::DEVICE_CPU), CompareBatchesOp);

}  // namespace sok
