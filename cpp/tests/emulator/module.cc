// `_cuda_emulated`: the bindings of the device tables over the emulator, for tests. Registers those
// only: everything else is `_core`'s, which is to be loaded first.
#include <pybind11/stl.h>

#include <vector>

#include "cpp/core/cuda/table/table.h"
#include "cpp/python/bind.h"
#include "cpp/tests/emulator/cuda_runtime.h"

PYBIND11_MODULE(_cuda_emulated, m) {
  sok::BindCuda(m);
  m.def("bytes_allocated", [] { return emulator::bytes_allocated; });
  m.def("read_int64", [](uint64_t address, size_t count) {
    std::vector<int64_t> values(count);
    sok::cuda::CopyToHost(nullptr, values.data(), reinterpret_cast<const void*>(address),
                          count * sizeof(int64_t));
    return values;
  });
  m.def("hold", [](const sok::cuda::CudaTable& table, bool held) {
    if (!held) return table.mutex().Release();
    const std::lock_guard<sok::cuda::HeldMutex> lock(table.mutex());
    table.mutex().Hold();
  });
  m.def("num_stream_waits", [] { return emulator::num_stream_waits; });
}
