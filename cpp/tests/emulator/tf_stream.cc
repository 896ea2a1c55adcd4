// TensorFlow's stream in the emulator. Arrays are in TensorFlow's host memory; a stream runs late as
// long as an op works, whose next may be one of the CPU's.
#include "cpp/tests/emulator/cuda_runtime.h"
#include "cpp/tf/cuda/kernel.h"

namespace sok {

namespace {
const bool has_host_arrays = emulator::host_arrays_allowed = true;
}  // namespace

cuda::Stream StreamOf(tensorflow::OpKernelContext*) { return nullptr; }

void EndOfWork(cuda::Stream) {
  const emulator::Lock lock(emulator::device_mutex);
  emulator::Streams::Get().FinishAll();
}

}  // namespace sok
