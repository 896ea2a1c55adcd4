// Replaces cpp/python/cuda/ in a build without CUDA: the names exist, and their errors say what to
// do.
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
  m.attr("CudaError") = py::module_::import("builtins").attr("RuntimeError");
  for (const char* name :
       {"CudaTable", "CudaArray", "CudaEvent", "cuda_device_info", "cuda_synchronize",
        "cuda_release_memory", "cuda_copy", "cuda_apply_gradients", "cuda_apply_gradients_to_rows",
        "cuda_unique_with_inverse", "cuda_combine", "cuda_combine_of_table",
        "cuda_combine_gradient", "cuda_group_lookup", "cuda_group_apply_gradients"}) {
    m.def(name, &Refuse);
  }
}

}  // namespace sok
