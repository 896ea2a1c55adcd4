// One optimizer step on the rows of a batch, of as many device tables as take it alike. In two
// rounds, as on the host: the first finds rows and does all that can fail, the second updates. So
// all tables make the step or none does.
#include "cpp/core/cuda/apply.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/optimizer_attrs.h"

namespace sok {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

namespace {

// The mutexes of all tables, in the one order that keeps two such ops from waiting for each other.
std::vector<std::unique_lock<std::mutex>> LockAll(const std::vector<DeviceTablePtr>& tables) {
  std::vector<DeviceTableResource*> order;
  for (const DeviceTablePtr& table : tables) order.push_back(table.get());
  std::sort(order.begin(), order.end());
  const auto twice = std::adjacent_find(order.begin(), order.end());
  if (twice != order.end()) {
    throw std::invalid_argument("A step must take each table once. Received: table '" +
                                (*twice)->options().name + "' twice");
  }
  std::vector<std::unique_lock<std::mutex>> locks;
  for (DeviceTableResource* table : order) locks.emplace_back(table->mutex());
  return locks;
}

class DeviceApplyGradientsOp : public OpKernel {
 public:
  explicit DeviceApplyGradientsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ReadOptimizer(ctx, &options_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<DeviceTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, grads;
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    const int n = keys.size();
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, CheckRowsShape("gradients", keys[i], grads[i], tables[i]->options()));
    }
    const float learning_rate = ctx->input(3 * n).scalar<float>()();
    const int64_t step = ctx->input(3 * n + 1).scalar<int64_t>()();
    OP_REQUIRES_OK(ctx, Guard([&] {
                     const auto locks = LockAll(tables);
                     std::vector<cuda::TableStep> steps;
                     const auto prepare = [&](bool may_be_full) {
                       std::exception_ptr first_error;
                       for (int i = 0; i < n; ++i) {
                         cuda::CudaTable& table = tables[i]->table();
                         if ((table.options().max_capacity > 0) != may_be_full) continue;
                         try {
                           steps.emplace_back(StreamOf(ctx), table, options_, learning_rate, step,
                                              Keys(keys[i]), grads[i].flat<float>().data(),
                                              keys[i].NumElements());
                         } catch (...) {
                           if (!first_error) first_error = std::current_exception();
                         }
                       }
                       if (first_error) std::rethrow_exception(first_error);
                     };
                     prepare(/*may_be_full=*/true);  // before the others take new keys
                     prepare(/*may_be_full=*/false);
                     for (cuda::TableStep& table_step : steps) table_step.Run();
                   }));
  }

 private:
  OptimizerOptions options_;
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(
    Name("SokApplyGradients").HostMemory("handles").HostMemory("learning_rate").HostMemory("step"),
    DeviceApplyGradientsOp);

}  // namespace sok
