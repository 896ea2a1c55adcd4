// The features of a lookup as an op sees them: lists of attributes and tensors, one item per table.
#ifndef SOK_TF_SAMPLES_H_
#define SOK_TF_SAMPLES_H_

#include <string>
#include <vector>

#include "cpp/core/batch.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/core/parallel.h"
#include "cpp/tf/common.h"

namespace sok {

// Inputs of each table: its flat keys, and its samples.
struct FeatureInputs {
  OpInputList keys, row_splits, weights;

  absl::Status Get(OpKernelContext* ctx) {
    return GetLists(ctx, {{"keys", &keys}, {"row_splits", &row_splits}, {"weights", &weights}});
  }
};

// Attributes `dims` and `combiners`, and if the op has them `table_names`, `max_hotness`,
// `key_limits`, `batch_multiples` and `keep_rows`.
class FeatureAttrs {
 public:
  absl::Status Init(OpKernelConstruction* ctx);

  int size() const { return static_cast<int>(dims_.size()); }
  int64_t dim(int i) const { return dims_[i]; }
  const std::vector<int64_t>& dims() const { return dims_; }
  const std::string& table_name(int i) const { return table_names_[i]; }
  int64_t key_limit(int i) const { return limits_[i].key_limit; }
  const BatchLimits& limits(int i) const { return limits_[i]; }
  bool has_samples(int i) const { return combiners_[i] != Combiner::kNone; }

  // Checks the shapes for all tables. Does not read the tensors, which may be in device memory.
  absl::Status CheckShapes(const FeatureInputs& in) const;
  // Checks for all tables that shapes agree and that the batch, in host memory, keeps its limits.
  absl::Status Check(Executor& ex, const FeatureInputs& in) const;
  Samples MakeSamples(int i, const Tensor& inverse, const Tensor& row_splits,
                      const Tensor& weights) const;
  Samples MakeSamples(int i, int64_t num_keys, const Tensor& row_splits,
                      const Tensor& weights) const;  // without `inverse`
  // The samples of all tables, from the op's inputs `inverse`, `row_splits` and `weights`.
  absl::Status GetSamples(OpKernelContext* ctx, std::vector<Samples>* samples) const;
  // The same, and the gradients of their embeddings, the input `grads`.
  absl::Status GetGradients(OpKernelContext* ctx, std::vector<Samples>* samples,
                            OpInputList* grads) const;
  // Allocates the output `embeddings`; `out` gets the data of each table.
  absl::Status MakeEmbeddings(OpKernelContext* ctx, const std::vector<Samples>& samples,
                              std::vector<float*>* out) const;
  // Allocates the output `key_rows`: [num_keys, dim] for tables of `keep_rows`, otherwise [0, dim],
  // for which `out` gets null.
  absl::Status MakeKeyRows(OpKernelContext* ctx, const FeatureInputs& in,
                           std::vector<float*>* out) const;
  // [batch, dim], or [num_keys, dim] if the combiner is "none".
  TensorShape OutputShape(int i, const Samples& samples) const;

 private:
  void CheckShape(int i, const FeatureInputs& in) const;

  std::vector<int64_t> dims_;
  std::vector<Combiner> combiners_;
  std::vector<std::string> table_names_;
  std::vector<BatchLimits> limits_;
  std::vector<bool> keep_rows_;  // empty: of no table
};

// A kernel with these attributes.
class FeatureOp : public OpKernel {
 public:
  explicit FeatureOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, features_.Init(ctx));
  }

 protected:
  FeatureAttrs features_;
};

// The outputs `unique_keys` and `inverse` of a lookup, which only its gradient reads: for each table
// an aligned part of one block. Empty for a lookup that inserts nothing.
class UniqueOutputs {
 public:
  // num_keys: [num_tables]
  absl::Status Allocate(OpKernelContext* ctx, const std::vector<int64_t>& num_keys);
  // Where the lookup of table i writes.
  void Place(int i, FeatureLookup* lookup);
  // Sets the outputs when all lookups have been made.
  absl::Status Set(OpKernelContext* ctx, const std::vector<FeatureLookup>& lookups) const;

 private:
  std::vector<int64_t> starts_, num_keys_;
  Tensor unique_keys_, inverse_;
};

// Shape function: output i is [batch, dims[i]] by the list input `row_splits`, or [num_keys,
// dims[i]] by the list input `keys` if combiners[i] is "none".
absl::Status SetEmbeddingShapes(tensorflow::shape_inference::InferenceContext* c, const char* keys,
                                const char* row_splits);

}  // namespace sok

#endif  // SOK_TF_SAMPLES_H_
