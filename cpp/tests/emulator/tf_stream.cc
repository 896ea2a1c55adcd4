// TensorFlow's stream in the emulator. Arrays are in TensorFlow's host memory, which may be another
// tensor's as soon as an op drops it; so nothing runs late.
#include "cpp/tests/emulator/cuda_runtime.h"
#include "cpp/tf/cuda/kernel.h"

namespace sok {

namespace {
const bool has_host_arrays = emulator::host_arrays_allowed = emulator::runs_at_once = true;
}  // namespace

cuda::Stream StreamOf(tensorflow::OpKernelContext*) { return nullptr; }

}  // namespace sok

// For tests, by way of ctypes: how often this process has waited for the device, and how many kernels,
// fills and copies it has launched.
extern "C" __attribute__((visibility("default"))) int64_t sok_emulator_host_waits() {
  return emulator::num_host_waits;
}
extern "C" __attribute__((visibility("default"))) int64_t sok_emulator_launches() {
  return emulator::num_launches;
}
