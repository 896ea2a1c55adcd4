// What the kernels of device tables share: the table as a TF resource, TF's stream as the core's,
// and where the kernels are registered.
//
//     SokLookup etc.   REGISTER_OP and the host tables' kernel      cpp/tf/lookup_ops.cc     CPU
//                      the device tables' kernel                    cpp/tf/cuda/lookup.cc    GPU
//
// An op is one, whichever table its handle names: TensorFlow places it where the table was made.
// Handles are in host memory; keys, rows and gradients are where the table is.
//
// Invariant: a kernel holds a table's mutex from the first call on the table to the last, so that
// row numbers stay valid between them; SokApplyGradients holds those of all its tables, taken in
// the order of their addresses, and no other kernel holds two. What it enqueues on TF's stream is
// behind everything that was enqueued for the table before.
//
// Tests register these kernels in the place of the CPU's, over emulated devices in host memory.
#ifndef SOK_TF_CUDA_KERNEL_H_
#define SOK_TF_CUDA_KERNEL_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "cpp/core/cuda/device.h"
#include "cpp/core/cuda/table.h"
#include "cpp/tf/common.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"

#ifndef SOK_TF_DEVICE
#define SOK_TF_DEVICE tensorflow::DEVICE_GPU
#define SOK_TF_PRIORITY 0
#endif
// Of several kernels for one device TF takes the one of the highest priority.
#define SOK_REGISTER_DEVICE_KERNEL(builder, Class) \
  REGISTER_KERNEL_BUILDER(builder.Device(SOK_TF_DEVICE).Priority(SOK_TF_PRIORITY), Class)

namespace sok {

// The stream that TF runs this op's work on.
cuda::Stream StreamOf(tensorflow::OpKernelContext* ctx);

class DeviceTableResource final : public tensorflow::ResourceBase {
 public:
  DeviceTableResource(const TableOptions& options, cuda::Stream stream);
  static DeviceTableResource* Create(tensorflow::OpKernelContext* ctx,
                                     const TableOptions& options) {
    return new DeviceTableResource(options, StreamOf(ctx));
  }
  std::mutex& mutex() { return mutex_; }
  cuda::CudaTable& table() { return table_; }  // to be used under the mutex
  const TableOptions& options() const { return table_.options(); }
  std::string DebugString() const override;

 private:
  std::mutex mutex_;
  cuda::CudaTable table_;
};

using DeviceTablePtr = tensorflow::core::RefCountPtr<DeviceTableResource>;

// The table behind input `index` of the op, and the tables behind the list input `name`.
absl::Status LookupTable(tensorflow::OpKernelContext* ctx, int index, DeviceTablePtr* table);
absl::Status LookupTables(tensorflow::OpKernelContext* ctx, const char* name,
                          std::vector<DeviceTablePtr>* tables);

// Runs `fn(table, stream)` under the table's mutex; what it throws becomes a Status as in Guard.
absl::Status WithTable(tensorflow::OpKernelContext* ctx, DeviceTableResource& table,
                       const std::function<void(cuda::CudaTable&, cuda::Stream)>& fn);

// Scratch memory for kernels without a table, one for each stream, for one kernel at a time. Runs
// `fn(workspace, stream)` inside a Scope of it.
absl::Status WithWorkspace(tensorflow::OpKernelContext* ctx,
                           const std::function<void(cuda::Workspace&, cuda::Stream)>& fn);

}  // namespace sok

#endif  // SOK_TF_CUDA_KERNEL_H_
