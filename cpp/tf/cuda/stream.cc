// TF's stream. A file of its own, because the emulator has its own version.
#include "xla/stream_executor/stream.h"

#include "cpp/tf/cuda/kernel.h"
#include "tensorflow/core/framework/device_base.h"

namespace sok {

cuda::Stream StreamOf(OpKernelContext* ctx) {
  // TF gives its CUstream, which is the runtime's cudaStream_t; so no header of CUDA is needed
  // here.
  return static_cast<cuda::Stream>(
      ctx->op_device_context()->stream()->platform_specific_handle().stream);
}

}  // namespace sok
