// Stands in for cpp/python/cuda/ in a build without CUDA: the names are there and say what to do.
#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

[[noreturn]] void Refuse(const py::args&, const py::kwargs&) {
  throw std::runtime_error(
      "Tables in device memory need a library built with CUDA. This one was built without: run "
      "`make cuda` where nvcc is, or install with CMAKE_ARGS=-DSOK_WITH_CUDA=ON");
}

}  // namespace

void BindCuda(py::module_& m) {
  m.def("cuda_device_count", [] { return 0; });
  for (const char* name : {"CudaTable", "CudaArray"}) m.def(name, &Refuse);
}

}  // namespace sok
