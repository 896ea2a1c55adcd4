// What the parts of the module `_core` share: NumPy arrays in and out, and one pool of threads.
//
// Keys come in as int64, int32, uint64 or uint32 and are held as uint64: signed keys are
// sign-extended, so that -1 is the same key in int32 and in int64.
#ifndef SOK_PYTHON_BIND_H_
#define SOK_PYTHON_BIND_H_

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"
#include "cpp/core/table_options.h"

namespace sok {

struct OptimizerOptions;

// One per part of the module; called by PYBIND11_MODULE(_core, m).
// BindTable registers `CpuTable` as `_core.Table`, held by std::shared_ptr, so that the others can
// take a `CpuTable&`.
void BindTable(pybind11::module_& m);
void BindCuda(pybind11::module_& m);
void BindRoute(pybind11::module_& m);
void BindOptimizer(pybind11::module_& m);
void BindCrc32(pybind11::module_& m);

// Fields of the options by name. Throws ValueError naming an unknown one.
StorageOptions ParseStorage(const pybind11::dict& fields);
PolicyOptions ParsePolicy(const pybind11::dict& fields);

using FloatArray = pybind11::array_t<float, pybind11::array::c_style>;

// The pool that all calls of the module run on; `set_num_threads(n)` replaces it. A call holds it
// by the pointer it got, so replacing it under a running call is safe.
std::shared_ptr<ThreadPool> SharedPool();

// A one-dimensional array of keys as uint64. Points into the NumPy array if that already has 64
// bits, and keeps it alive.
class KeyArray {
 public:
  // Throws ValueError, naming `argument`, unless `keys` is a one-dimensional array (or sequence)
  // of integers, all of them in the range of `type`.
  KeyArray(const pybind11::object& keys, KeyType type, const char* argument = "keys");

  const uint64_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  pybind11::array array_;
  std::vector<uint64_t> widened_;
  const uint64_t* data_ = nullptr;
  int64_t size_ = 0;
};

// Keys back to Python, in the dtype of `type`.
pybind11::array KeysToNumpy(const uint64_t* keys, int64_t num_keys, KeyType type);

// A float32 array of exactly that shape; other dtypes are converted. Throws ValueError naming
// `argument`, the shape it must have and the shape it has.
FloatArray FloatsOfShape(const pybind11::object& values, const std::vector<int64_t>& shape,
                         const char* argument);

// Fills in options->initializer of a table on any device, once its name and dim are set. Throws
// ValueError naming the argument.
void SetInitializer(const std::string& initializer, float a, float b,
                    const pybind11::object& default_rows, TableOptions* options);

// Options by name; an unknown one is a TypeError, not a silent default.
OptimizerOptions OptionsFromKeywords(const std::string& rule, const pybind11::kwargs& keywords);

// Sets the field `name` of options with ForEachField; false if there is none.
template <typename Options>
bool SetField(Options* options, const std::string& name, const pybind11::handle& value) {
  bool known = false;
  Options::ForEachField(*options, [&](const char* field_name, auto& field, auto...) {
    if (name != field_name) return;
    field = pybind11::cast<std::decay_t<decltype(field)>>(value);
    known = true;
  });
  return known;
}

FloatArray NewFloats(const std::vector<int64_t>& shape);

}  // namespace sok

#endif  // SOK_PYTHON_BIND_H_
