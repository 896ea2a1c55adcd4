// What the kernels of device tables share: the table as a TF resource, TF's stream as the core's,
// and where the kernels are registered.
//
//     SokLookup etc.   REGISTER_OP and the host tables' kernel      cpp/tf/lookup_ops.cc     CPU
//                      the device tables' kernel                    cpp/tf/cuda/lookup.cc    GPU
//
// Each op serves both kinds of table: TensorFlow places it where the table was made. Handles are in
// host memory; keys, rows and gradients are where the table is. Ops on one table have one kernel
// for both: SOK_REGISTER_TABLE_KERNEL.
//
// Invariant: a kernel holds a table's mutex from the first call on the table to the last, so that
// row numbers stay valid between them. It locks several tables in order of their addresses. Its
// work on TF's stream is ordered after all earlier work for the table.
//
// Tests register these kernels in place of the CPU's, over emulated devices in host memory.
#ifndef SOK_TF_CUDA_KERNEL_H_
#define SOK_TF_CUDA_KERNEL_H_

#include <functional>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/tf/common.h"

#ifndef SOK_TF_DEVICE
#define SOK_TF_DEVICE tensorflow::DEVICE_GPU
#define SOK_TF_PRIORITY 0
#endif
// Of several kernels for one device TF takes the one of the highest priority.
#define SOK_REGISTER_DEVICE_KERNEL(builder, Class) \
  REGISTER_KERNEL_BUILDER(builder.Device(SOK_TF_DEVICE).Priority(SOK_TF_PRIORITY), Class)

namespace sok {

// The stream that TF runs this op's work on.
cuda::Stream StreamOf(OpKernelContext* ctx);

class DeviceTableResource final : public TableResource {
 public:
  DeviceTableResource(OpKernelContext* ctx, const TableOptions& options);
  cuda::CudaTable& table() const override { return table_; }
  absl::Status Run(OpKernelContext* ctx, const std::function<void(CallContext)>& fn) override;
  TableRunner RunnerOf(OpKernelContext* ctx) override;

 private:
  mutable cuda::CudaTable table_;
};

using DeviceTablePtr = tensorflow::core::RefCountPtr<DeviceTableResource>;

// Runs `fn(stream)` under the mutexes of all tables, which may repeat; what it throws becomes a
// Status as in Guard.
absl::Status WithTables(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                        const std::function<void(cuda::Stream)>& fn);

// Scratch memory for kernels without a table: one workspace per stream, for one kernel at a time.
// Runs `fn(workspace, stream)` inside a Scope of it.
absl::Status WithWorkspace(OpKernelContext* ctx,
                           const std::function<void(cuda::Workspace&, cuda::Stream)>& fn);

}  // namespace sok

#endif  // SOK_TF_CUDA_KERNEL_H_
