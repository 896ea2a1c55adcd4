// The kernel of SokApplyGradients; host and device tables each add their step.
#ifndef SOK_TF_OPTIMIZER_OP_H_
#define SOK_TF_OPTIMIZER_OP_H_

#include <string>
#include <vector>

#include "cpp/core/optimizer.h"
#include "cpp/tf/common.h"

namespace sok {

// `Gradients`: the core's struct of a table and its gradients. `Step::Apply(ctx, tables, batches,
// options, learning_rate, step, keys_are_unique)` returns a Status.
template <typename Resource, typename Gradients, typename Step>
class OptimizerOp : public OpKernel {
 public:
  explicit OptimizerOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    std::string rule;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("rule", &rule));
    OP_REQUIRES_OK(ctx, ReadFields(ctx, &options_));
    OP_REQUIRES_OK(ctx, Guard([&] {
                     options_.kind = ParseOptimizerKind(rule);
                     options_.Validate();
                   }));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keys_are_unique", &keys_are_unique_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<tensorflow::core::RefCountPtr<Resource>> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, grads;
    OP_REQUIRES_OK(ctx, GetLists(ctx, {{"keys", &keys}, {"grads", &grads}}));
    const int n = keys.size();
    std::vector<Gradients> batches;
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckRowsShape("gradients", keys[i], grads[i], tables[i]->options()));
      batches.push_back({&tables[i]->table(), Keys(keys[i]), grads[i].flat<float>().data(),
                         keys[i].NumElements()});
    }
    OP_REQUIRES_OK(ctx,
                   Step::Apply(ctx, tables, batches, options_, ctx->input(3 * n).scalar<float>()(),
                               ctx->input(3 * n + 1).scalar<int64_t>()(), keys_are_unique_));
  }

 private:
  OptimizerOptions options_;
  bool keys_are_unique_;
};

}  // namespace sok

#endif  // SOK_TF_OPTIMIZER_OP_H_
