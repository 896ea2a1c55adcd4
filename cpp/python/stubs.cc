// Stand-ins for the parts of the module that are not there yet.
#include "cpp/python/bind.h"

namespace sok {

__attribute__((weak)) void BindRoute(pybind11::module_&) {}
__attribute__((weak)) void BindOptimizer(pybind11::module_&) {}

}  // namespace sok
