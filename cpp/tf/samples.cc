#include "cpp/tf/samples.h"

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "cpp/tf/batch_watch.h"
#include "cpp/tf/common.h"

namespace sok {

using tensorflow::shape_inference::DimensionHandle;

absl::Status FeatureAttrs::Init(OpKernelConstruction* ctx) {
  std::vector<std::string> combiners;
  TF_RETURN_IF_ERROR(ctx->GetAttr("dims", &dims_));
  TF_RETURN_IF_ERROR(ctx->GetAttr("combiners", &combiners));
  TF_RETURN_IF_ERROR(Guard([&] {
    for (const std::string& name : combiners) combiners_.push_back(ParseCombiner(name));
  }));
  limits_.resize(dims_.size());
  if (ctx->HasAttr("table_names")) {
    std::vector<int64_t> max_hotness, key_limits, multiples;
    TF_RETURN_IF_ERROR(ctx->GetAttr("table_names", &table_names_));
    TF_RETURN_IF_ERROR(ctx->GetAttr("max_hotness", &max_hotness));
    TF_RETURN_IF_ERROR(ctx->GetAttr("key_limits", &key_limits));
    TF_RETURN_IF_ERROR(ctx->GetAttr("batch_multiples", &multiples));
    if (max_hotness.size() != dims_.size() || key_limits.size() != dims_.size() ||
        multiples.size() != dims_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("max_hotness, key_limits and batch_multiples must each have ", dims_.size(),
                       " items, as dims. Received: ", max_hotness.size(), ", ", key_limits.size(),
                       " and ", multiples.size()));
    }
    for (size_t i = 0; i < dims_.size(); ++i)
      limits_[i] = {max_hotness[i], key_limits[i], multiples[i]};
  } else {
    table_names_.resize(dims_.size());
  }
  if (ctx->HasAttr("keep_rows")) {
    TF_RETURN_IF_ERROR(ctx->GetAttr("keep_rows", &keep_rows_));
    if (!keep_rows_.empty() && keep_rows_.size() != dims_.size()) {
      return absl::InvalidArgumentError("keep_rows must be empty or have one item per table");
    }
  }
  if (combiners_.size() != dims_.size() || table_names_.size() != dims_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "combiners and table_names must each have ", dims_.size(),
        " items, as dims. Received: ", combiners_.size(), " and ", table_names_.size()));
  }
  return absl::OkStatus();
}

absl::Status FeatureAttrs::CheckShapes(const FeatureInputs& in) const {
  return Guard([&] {
    for (int i = 0; i < size(); ++i) CheckShape(i, in);
  });
}

absl::Status FeatureAttrs::Check(Executor& ex, const FeatureInputs& in) const {
  return Guard([&] {
    for (int i = 0; i < size(); ++i) {
      CheckShape(i, in);
      CheckBatch(ex, table_names_[i], limits_[i], Keys(in.keys[i]), in.keys[i].NumElements(),
                 has_samples(i) ? in.row_splits[i].flat<int64_t>().data() : nullptr,
                 in.row_splits[i].NumElements() - 1);
    }
    for (int i = 0; ObservesBatches() && i < size(); ++i) {
      ObserveBatch(table_names_[i], Keys(in.keys[i]), in.keys[i].NumElements());
    }
  });
}

void FeatureAttrs::CheckShape(int i, const FeatureInputs& in) const {
  const int64_t num_keys = in.keys[i].NumElements(), num_weights = in.weights[i].NumElements();
  if (has_samples(i) && in.row_splits[i].NumElements() < 1) {
    throw std::invalid_argument(
        absl::StrCat("row_splits must hold at least one element (table '", table_names_[i], "')"));
  }
  if (num_weights != 0 && num_weights != num_keys) {
    throw std::invalid_argument(absl::StrCat("weights must hold one weight per key: ", num_keys,
                                             ". Received: ", num_weights, " (table '",
                                             table_names_[i], "')"));
  }
}

Samples FeatureAttrs::MakeSamples(int i, const Tensor& inverse, const Tensor& row_splits,
                                  const Tensor& weights) const {
  Samples samples = MakeSamples(i, inverse.NumElements(), row_splits, weights);
  samples.inverse = Places(inverse);
  return samples;
}

Samples FeatureAttrs::MakeSamples(int i, int64_t num_keys, const Tensor& row_splits,
                                  const Tensor& weights) const {
  Samples samples;
  samples.combiner = combiners_[i];
  samples.num_keys = num_keys;
  if (samples.combiner != Combiner::kNone) {
    samples.row_splits = row_splits.flat<int64_t>().data();
    samples.batch = row_splits.NumElements() - 1;
  }
  if (weights.NumElements() > 0) samples.weights = weights.flat<float>().data();
  return samples;
}

TensorShape FeatureAttrs::OutputShape(int i, const Samples& samples) const {
  return TensorShape({samples.num_samples(), dims_[i]});
}

absl::Status FeatureAttrs::GetSamples(OpKernelContext* ctx, std::vector<Samples>* samples) const {
  OpInputList inverse, row_splits, weights;
  TF_RETURN_IF_ERROR(
      GetLists(ctx, {{"inverse", &inverse}, {"row_splits", &row_splits}, {"weights", &weights}}));
  for (int i = 0; i < size(); ++i) {
    samples->push_back(MakeSamples(i, inverse[i], row_splits[i], weights[i]));
  }
  return absl::OkStatus();
}

absl::Status FeatureAttrs::GetGradients(OpKernelContext* ctx, std::vector<Samples>* samples,
                                        OpInputList* grads) const {
  TF_RETURN_IF_ERROR(ctx->input_list("grads", grads));
  TF_RETURN_IF_ERROR(GetSamples(ctx, samples));
  for (int i = 0; i < size(); ++i) {
    const TensorShape shape = OutputShape(i, (*samples)[i]);
    if ((*grads)[i].shape() == shape) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient of an embedding must have its shape ", shape.DebugString(),
                     ". Received: ", (*grads)[i].shape().DebugString()));
  }
  return absl::OkStatus();
}

absl::Status FeatureAttrs::MakeEmbeddings(OpKernelContext* ctx, const std::vector<Samples>& samples,
                                          std::vector<float*>* out) const {
  OpOutputList embeddings;
  TF_RETURN_IF_ERROR(ctx->output_list("embeddings", &embeddings));
  for (int i = 0; i < size(); ++i) {
    Tensor* made;
    TF_RETURN_IF_ERROR(embeddings.allocate(i, OutputShape(i, samples[i]), &made));
    out->push_back(made->flat<float>().data());
  }
  return absl::OkStatus();
}

absl::Status FeatureAttrs::MakeKeyRows(OpKernelContext* ctx, const FeatureInputs& in,
                                       std::vector<float*>* out) const {
  OpOutputList key_rows;
  TF_RETURN_IF_ERROR(ctx->output_list("key_rows", &key_rows));
  for (int i = 0; i < size(); ++i) {
    const bool kept = !keep_rows_.empty() && keep_rows_[i];
    const int64_t num_rows = kept ? in.keys[i].NumElements() : 0;
    Tensor* made;
    TF_RETURN_IF_ERROR(key_rows.allocate(i, TensorShape({num_rows, dims_[i]}), &made));
    out->push_back(kept ? made->flat<float>().data() : nullptr);
  }
  return absl::OkStatus();
}

absl::Status UniqueOutputs::Allocate(OpKernelContext* ctx, const std::vector<int64_t>& num_keys) {
  constexpr int64_t kAlignment = EIGEN_MAX_ALIGN_BYTES / sizeof(int32_t);
  num_keys_ = num_keys;
  int64_t end = 0;
  for (const int64_t count : num_keys) {
    starts_.push_back(end);
    end += (count + kAlignment - 1) / kAlignment * kAlignment;
  }
  TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({end}), &unique_keys_));
  return ctx->allocate_temp(tensorflow::DT_UINT32, TensorShape({end}), &inverse_);
}

void UniqueOutputs::Place(int i, FeatureLookup* lookup) {
  lookup->unique_keys = Keys(&unique_keys_) + starts_[i];
  lookup->inverse = Places(&inverse_) + starts_[i];
}

absl::Status UniqueOutputs::Set(OpKernelContext* ctx,
                                const std::vector<FeatureLookup>& lookups) const {
  OpOutputList unique_keys, inverse;
  TF_RETURN_IF_ERROR(GetLists(ctx, {}, {{"unique_keys", &unique_keys}, {"inverse", &inverse}}));
  for (size_t i = 0; i < lookups.size(); ++i) {
    const int64_t start = starts_[i];
    unique_keys.set(i, unique_keys_.Slice(start, start + lookups[i].num_unique));
    inverse.set(i, inverse_.Slice(start, start + num_keys_[i]));
  }
  return absl::OkStatus();
}

absl::Status SetEmbeddingShapes(InferenceContext* c, const char* keys, const char* row_splits) {
  std::vector<int64_t> dims;
  std::vector<std::string> combiners;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", &combiners));
  std::vector<ShapeHandle> key_shapes, split_shapes;
  TF_RETURN_IF_ERROR(c->input(keys, &key_shapes));
  TF_RETURN_IF_ERROR(c->input(row_splits, &split_shapes));
  for (size_t i = 0; i < dims.size(); ++i) {
    ShapeHandle key_shape, split_shape;
    TF_RETURN_IF_ERROR(c->WithRank(key_shapes[i], 1, &key_shape));
    TF_RETURN_IF_ERROR(c->WithRank(split_shapes[i], 1, &split_shape));
    DimensionHandle first = c->Dim(key_shape, 0);
    if (combiners[i] != "none") TF_RETURN_IF_ERROR(c->Subtract(c->Dim(split_shape, 0), 1, &first));
    c->set_output(i, c->Matrix(first, dims[i]));
  }
  return absl::OkStatus();
}

}  // namespace sok
