#include <algorithm>
#include <vector>

#include "cpp/core/crc32.h"
#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

py::array_t<uint32_t> Crc32OfBlocks(const py::buffer& data, int64_t first, int64_t block) {
  const py::buffer_info info = data.request();
  if (first < 1 || block < 1 || !PyBuffer_IsContiguous(info.view(), 'C')) {
    throw py::value_error("`data` must be contiguous, `first` and `block` at least 1");
  }
  const int64_t num_bytes = info.size * info.itemsize;
  std::vector<uint32_t> found;
  {
    const py::gil_scoped_release release;
    const char* const bytes = static_cast<const char*>(info.ptr);
    for (int64_t begin = 0; begin < num_bytes;) {
      const int64_t n = std::min(begin == 0 ? first : block, num_bytes - begin);
      found.push_back(Crc32(0, bytes + begin, static_cast<size_t>(n)));
      begin += n;
    }
  }
  return py::array_t<uint32_t>(static_cast<py::ssize_t>(found.size()), found.data());
}

}  // namespace

void BindCrc32(py::module_& m) {
  m.def("crc32_of_blocks", &Crc32OfBlocks, py::arg("data"), py::arg("first"), py::arg("block"),
        "CRC-32 of the first `first` bytes of a buffer and of each `block` bytes after them.");
  m.def("crc32_of_two", &CombineCrc32, py::arg("first"), py::arg("second"), py::arg("num_bytes"),
        "CRC-32 of bytes with CRC `first` followed by `num_bytes` bytes with CRC `second`.");
}

}  // namespace sok
