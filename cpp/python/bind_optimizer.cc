// Optimizer steps on a table, from NumPy arrays.
#include <pybind11/stl.h>

#include <map>
#include <memory>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/replayed_steps.h"
#include "cpp/core/optimizer.h"
#include "cpp/core/slots.h"
#include "cpp/python/bind.h"

namespace py = pybind11;

namespace sok {
namespace {

void Apply(CpuTable& table, const std::string& rule, float learning_rate, int64_t step,
           const py::object& keys, const py::object& grads, bool keys_are_unique,
           const py::kwargs& keywords) {
  const OptimizerOptions options = OptionsFromKeywords(rule, keywords);
  const KeyArray key_array(keys, table.options().key_type);
  const FloatArray grad_array = FloatsOfShape(grads, {key_array.size(), table.dim()}, "grads");
  const py::gil_scoped_release release;
  ApplyGradients(*SharedPool(), table, options, learning_rate, step, key_array.data(),
                 grad_array.data(), key_array.size(), keys_are_unique);
}

}  // namespace

OptimizerOptions OptionsFromKeywords(const std::string& rule, const py::kwargs& keywords) {
  OptimizerOptions options;
  options.kind = ParseOptimizerKind(rule);
  for (const auto& item : keywords) {
    const std::string name = item.first.cast<std::string>();
    if (!SetField(&options, name, item.second)) {
      throw py::type_error("apply_gradients() has no optimizer option '" + name + "'");
    }
  }
  options.Validate();
  return options;
}

namespace {

std::map<std::string, int64_t> SlotWidths(const std::string& rule, int64_t dim,
                                          const py::kwargs& keywords) {
  std::map<std::string, int64_t> found;
  for (const SlotVariableSpec& slot : OptimizerSlots(OptionsFromKeywords(rule, keywords), dim)) {
    found[slot.name] = slot.width;
  }
  return found;
}

// `segments`: one (rule, options, steps [num_runs, 3]) per delta.
std::unique_ptr<ReplayedSteps> MakeReplayedSteps(int64_t dim, const std::vector<std::string>& names,
                                                 const std::vector<int64_t>& widths,
                                                 const py::list& segments) {
  std::vector<ReplayedSteps::Segment> found;
  for (const py::handle& item : segments) {
    const auto segment = item.cast<py::tuple>();
    const auto steps =
        segment[2].cast<py::array_t<double, py::array::c_style | py::array::forcecast>>();
    ReplayedSteps::Segment next;
    if (steps.shape(0) > 0) {
      next.options = OptionsFromKeywords(segment[0].cast<std::string>(),
                                         segment[1].cast<py::dict>().cast<py::kwargs>());
    }
    for (py::ssize_t i = 0; i < steps.shape(0); ++i) {
      next.steps.push_back({static_cast<int64_t>(steps.at(i, 0)), steps.at(i, 1),
                            static_cast<int64_t>(steps.at(i, 2))});
    }
    found.push_back(std::move(next));
  }
  const py::gil_scoped_release release;
  return std::make_unique<ReplayedSteps>(dim, names, widths, found);
}

void BringUp(const ReplayedSteps& steps, int64_t dump, FloatArray rows, FloatArray slot_rows) {
  float* const row_data = rows.mutable_data();
  float* const slot_data = slot_rows.mutable_data();
  const int64_t num_rows = rows.shape(0);
  const py::gil_scoped_release release;
  steps.BringUp(*SharedPool(), dump, num_rows, row_data, slot_data);
}

}  // namespace

void BindOptimizer(py::module_& m) {
  py::class_<ReplayedSteps>(m, "ReplayedSteps",
                            "The steps that deltas have logged, for rows of dumps before them.")
      .def(py::init(&MakeReplayedSteps), py::arg("dim"), py::arg("slot_names"),
           py::arg("slot_widths"), py::arg("segments"))
      .def("bring_up", &BringUp, py::arg("dump"), py::arg("rows").noconvert(),
           py::arg("slot_rows").noconvert(),
           "Brings up rows [num_rows, dim] and slot rows of a dump, 0 for the base, in place.");
  m.def("apply_gradients", &Apply, py::arg("table"), py::arg("rule"), py::arg("learning_rate"),
        py::arg("step"), py::arg("keys"), py::arg("grads"), py::kw_only(),
        py::arg("keys_are_unique") = false,
        "One optimizer step on the rows of `keys`; keywords are the fields of OptimizerOptions.");
  m.def("slot_widths", &SlotWidths, py::arg("rule"), py::arg("dim"),
        "Floats per row of each slot variable, by name; keywords as in apply_gradients.");
}

}  // namespace sok
