#include "cpp/tf/placements.h"

#include "absl/strings/str_cat.h"

namespace sok {

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

}  // namespace sok
