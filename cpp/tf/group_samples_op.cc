// The samples of a group of tables, given as one RaggedTensor [num_tables, batch, None], by table.
//
//     table_splits  0 2 3             samples 0 and 1 are of table 0, sample 2 of table 1
//     row_splits    0 1 4 6           its keys begin at 0, 1 and 4 in `keys`, which ends at 6
//
//     keys of table 0: 0..4, row_splits 0 1 4         of table 1: 4..6, row_splits 0 2
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/group.h"
#include "cpp/tf/common.h"

namespace sok {
namespace {

REGISTER_OP("SokGroupSamples")
    .Input("keys: int64")
    .Input("weights: float")
    .Input("table_splits: int64")
    .Input("row_splits: int64")
    .Output("table_keys: N * int64")
    .Output("table_weights: N * float")
    .Output("table_row_splits: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Flat keys [num_keys] of N tables, as samples by row_splits [num_samples + 1], which are "
        "those of tables by table_splits [N + 1], to the keys and row_splits [batch + 1] of each "
        "table. Empty weights stay empty.");

// An error unless `splits` lead from 0 to `end` and never back.
absl::Status CheckSplits(const Tensor& splits, int64_t end, const char* what) {
  const auto values = splits.flat<int64_t>();
  const int64_t n = values.size();
  if (n > 0 && values(0) == 0 && values(n - 1) == end &&
      std::is_sorted(values.data(), values.data() + n)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " must rise from 0 to ", end, ". Received: ", splits.SummarizeValue(8)));
}

absl::Status SplitSamples(OpKernelContext* ctx) {
  const Tensor &keys = ctx->input(0), &weights = ctx->input(1), &table_splits = ctx->input(2),
               &row_splits = ctx->input(3);
  OpOutputList table_keys, table_weights, table_row_splits;
  TF_RETURN_IF_ERROR(GetLists(ctx, {},
                              {{"table_keys", &table_keys},
                               {"table_weights", &table_weights},
                               {"table_row_splits", &table_row_splits}}));
  const int n = table_keys.size();
  if (table_splits.NumElements() != n + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("ids of a group must be of shape [num_tables, batch, None] for its ", n,
                     " tables. Received: ", table_splits.NumElements() - 1, " tables"));
  }
  TF_RETURN_IF_ERROR(CheckSplits(row_splits, keys.NumElements(), "the samples' row_splits"));
  TF_RETURN_IF_ERROR(
      CheckSplits(table_splits, row_splits.NumElements() - 1, "the tables' row_splits"));
  const bool weighted = weights.NumElements() > 0;
  if (weighted && weights.NumElements() != keys.NumElements()) {
    return absl::InvalidArgumentError(absl::StrCat("`sp_weights` must have one weight for each of ",
                                                   keys.NumElements(),
                                                   " ids. Received: ", weights.NumElements()));
  }
  const int64_t* const tables = table_splits.flat<int64_t>().data();
  const int64_t* const splits = row_splits.flat<int64_t>().data();
  std::vector<int64_t> num_keys(n);
  std::vector<Tensor*> outs(3 * n);
  for (int i = 0; i < n; ++i) {
    num_keys[i] = splits[tables[i + 1]] - splits[tables[i]];
    const int64_t batch = tables[i + 1] - tables[i];
    TF_RETURN_IF_ERROR(table_keys.allocate(i, TensorShape({num_keys[i]}), &outs[3 * i]));
    TF_RETURN_IF_ERROR(
        table_weights.allocate(i, TensorShape({weighted ? num_keys[i] : 0}), &outs[3 * i + 1]));
    TF_RETURN_IF_ERROR(table_row_splits.allocate(i, TensorShape({batch + 1}), &outs[3 * i + 2]));
  }
  return ForEachTable(ctx, num_keys, [&](Executor&, int64_t i) {
    const int64_t first = splits[tables[i]];
    std::copy_n(keys.flat<int64_t>().data() + first, num_keys[i],
                outs[3 * i]->flat<int64_t>().data());
    if (weighted) {
      std::copy_n(weights.flat<float>().data() + first, num_keys[i],
                  outs[3 * i + 1]->flat<float>().data());
    }
    std::transform(splits + tables[i], splits + tables[i + 1] + 1,
                   outs[3 * i + 2]->flat<int64_t>().data(),
                   [first](int64_t split) { return split - first; });
  });
}
REGISTER_KERNEL_BUILDER(Name("SokGroupSamples").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<SplitSamples>);

}  // namespace
}  // namespace sok
