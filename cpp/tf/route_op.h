// The kernel of SokRoute. Host and device each add how a batch is checked, grouped and written.
#ifndef SOK_TF_ROUTE_OP_H_
#define SOK_TF_ROUTE_OP_H_

#include <vector>

#include "cpp/core/place.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/samples.h"

namespace sok {

class RouteOp : public FeatureOp {
 public:
  explicit RouteOp(OpKernelConstruction* ctx);
  void Compute(OpKernelContext* ctx) override;

 protected:
  struct Batch {
    FeatureInputs in;
    Tensor* counts;                // [world_size, num_tables], in host memory
    std::vector<Tensor*> inverse;  // of each table

    int64_t num_tables() const { return inverse.size(); }
  };
  // Sets the message, `counts` and `inverse`, or says why that is impossible. May set `starts`.
  virtual absl::Status Group(OpKernelContext* ctx, const Batch& batch) const = 0;
  // Sets the message to this failure and `inverse` to zeros.
  virtual absl::Status Fail(OpKernelContext* ctx, const absl::Status& status,
                            const Batch& batch) const = 0;

  static constexpr int kInverse = 3;  // the first of these outputs; `starts` is behind them
  bool is_placed(int64_t i) const { return !placements_.empty() && placements_[i].owner != kByKey; }

  int64_t world_size_;
  std::vector<RowPlacement> placements_;  // empty: keys go to key % world_size unchanged
};

}  // namespace sok

#endif  // SOK_TF_ROUTE_OP_H_
