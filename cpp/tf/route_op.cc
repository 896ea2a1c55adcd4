#include "cpp/tf/route_op.h"

#include "absl/strings/str_cat.h"

namespace sok {
namespace {

// One per feature, or none if the op has no owners.
absl::Status GetPlacements(OpKernelConstruction* ctx, const FeatureAttrs& features,
                           int64_t world_size, std::vector<RowPlacement>* placements) {
  std::vector<int64_t> owners, row_offsets;
  TF_RETURN_IF_ERROR(ctx->GetAttr("owners", &owners));
  TF_RETURN_IF_ERROR(ctx->GetAttr("row_offsets", &row_offsets));
  const size_t places = owners.empty() ? 0 : features.size();
  if (owners.size() != places || row_offsets.size() != places) {
    return absl::InvalidArgumentError(absl::StrCat(
        "owners and row_offsets must be empty or have one item per table. Received: ",
        owners.size(), " and ", row_offsets.size(), " items for ", features.size(), " tables"));
  }
  for (size_t i = 0; i < places; ++i) {
    const bool dense = owners[i] >= kAllRanks && features.key_limit(i) > 0;
    if (owners[i] >= world_size || (!dense && owners[i] != kByKey)) {
      return absl::InvalidArgumentError(
          absl::StrCat("owners must be ranks, -1 or -2. Received: ", owners[i]));
    }
    placements->push_back({features.key_limit(i), owners[i], row_offsets[i]});
  }
  return absl::OkStatus();
}

}  // namespace

RouteOp::RouteOp(OpKernelConstruction* ctx) : FeatureOp(ctx) {
  if (!ctx->status().ok()) return;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_size_));
  OP_REQUIRES_OK(ctx, GetPlacements(ctx, features_, world_size_, &placements_));
}

void RouteOp::Compute(OpKernelContext* ctx) {
  Batch batch;
  OpOutputList inverse;
  OP_REQUIRES_OK(ctx, batch.in.Get(ctx));
  OP_REQUIRES_OK(ctx, ctx->output_list("inverse", &inverse));
  const int64_t n = batch.in.keys.size();
  OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({world_size_, n}), &batch.counts));
  batch.inverse.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    OP_REQUIRES_OK(ctx, inverse.allocate(i, batch.in.keys[i].shape(), &batch.inverse[i]));
  }
  absl::Status status = FirstProblem(ctx);
  if (status.ok()) status = Group(ctx, batch);
  const int starts = kInverse + static_cast<int>(n);
  if (ctx->mutable_output(starts) == nullptr) OP_REQUIRES_OK(ctx, SetEmpty(ctx, starts, 1));
  if (status.ok()) return;
  batch.counts->flat<int64_t>().setZero();
  OP_REQUIRES_OK(ctx, Fail(ctx, status, batch));
}

}  // namespace sok
