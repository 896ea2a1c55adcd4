// Strings to keys, on all threads.
#include "cpp/tf/common.h"
#include "tensorflow/core/platform/fingerprint.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 2048;  // strings worth handing to another thread

REGISTER_OP("SokFingerprints")
    .Input("strings: string")
    .Output("keys: int64")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The 64-bit FarmHash fingerprint of each string, as TensorFlow's Fingerprint gives it.");

absl::Status Fingerprints(OpKernelContext* ctx) {
  const Tensor& strings = ctx->input(0);
  Tensor* keys;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, strings.shape(), &keys));
  const auto* const from = strings.flat<tensorflow::tstring>().data();
  int64_t* const to = keys->flat<int64_t>().data();
  TfExecutor(ctx).ParallelFor(strings.NumElements(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      to[i] = static_cast<int64_t>(tensorflow::Fingerprint64(from[i]));
    }
  });
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokFingerprints").Device(tensorflow::DEVICE_CPU),
                        FunctionOp<Fingerprints>);

}  // namespace
}  // namespace sok
