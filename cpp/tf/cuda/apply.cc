// One optimizer step on the rows of a batch, for all device tables that make the same step.
#include "cpp/core/cuda/update/apply.h"

#include <vector>

#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/optimizer_op.h"

namespace sok {
namespace {

struct DeviceStep {
  static absl::Status Apply(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                            const std::vector<cuda::TableGradients>& batches,
                            const OptimizerOptions& options, float learning_rate, int64_t step,
                            bool keys_are_unique) {
    return WithTables(ctx, tables, [&](cuda::Stream stream) {
      cuda::ApplyGradients(stream, batches, options, learning_rate, step, keys_are_unique);
    });
  }
};

using DeviceOptimizerOp = OptimizerOp<DeviceTableResource, cuda::TableGradients, DeviceStep>;
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokApplyGradients").HostMemory("handles").HostMemory("learning_rate").HostMemory("step"),
    DeviceOptimizerOp);

}  // namespace
}  // namespace sok
