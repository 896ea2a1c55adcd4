// Where the rows of dense tables are: attributes `owners` and `row_offsets` of SokRoute.
#ifndef SOK_TF_PLACEMENTS_H_
#define SOK_TF_PLACEMENTS_H_

#include <vector>

#include "cpp/core/place.h"
#include "cpp/tf/samples.h"

namespace sok {

// One per feature, or none if the op has no owners: keys then go to key % world_size unchanged.
absl::Status GetPlacements(OpKernelConstruction* ctx, const FeatureAttrs& features,
                           int64_t world_size, std::vector<RowPlacement>* placements);

}  // namespace sok

#endif  // SOK_TF_PLACEMENTS_H_
