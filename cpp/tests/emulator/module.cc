// `_cuda_emulated`: the bindings of the device tables over the emulator, for tests. Registers those
// only: everything else is `_core`'s, which is to be loaded first.
#include "cpp/python/bind.h"
#include "cpp/tests/emulator/cuda_runtime.h"

PYBIND11_MODULE(_cuda_emulated, m) {
  sok::BindCuda(m);
  m.def("bytes_allocated", [] { return emulator::bytes_allocated; });
  m.def("num_stream_waits", [] { return emulator::num_stream_waits; });
}
