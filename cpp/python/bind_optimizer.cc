// Optimizer steps on a table, from NumPy arrays.
#include "cpp/core/cpu/apply.h"
#include "cpp/core/optimizer.h"
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
    bool known = false;
    const auto number = [&](const char* field_name, float& field) {
      if (name != field_name) return;
      field = static_cast<float>(item.second.cast<double>());
      known = true;
    };
    const auto flag = [&](const char* field_name, bool& field) {
      if (name != field_name) return;
      field = item.second.cast<bool>();
      known = true;
    };
    number("momentum", options.momentum);
    flag("nesterov", options.nesterov);
    flag("lazy", options.lazy);
    flag("momentum_before_rate", options.momentum_before_rate);
    number("beta_1", options.beta_1);
    number("beta_2", options.beta_2);
    number("epsilon", options.epsilon);
    flag("amsgrad", options.amsgrad);
    number("row_weight_decay", options.row_weight_decay);
    number("initial_accumulator", options.initial_accumulator);
    if (name == "decay_steps") {
      options.decay_steps = item.second.cast<int64_t>();
      known = true;
    }
    number("decay_rate", options.decay_rate);
    number("l1", options.l1);
    number("l2", options.l2);
    number("l2_shrinkage", options.l2_shrinkage);
    number("learning_rate_power", options.learning_rate_power);
    number("beta", options.beta);
    number("weight_decay", options.weight_decay);
    number("clip_value", options.clip_value);
    if (!known) {
      throw py::type_error("apply_gradients() has no optimizer option '" + name + "'");
    }
  }
  options.Validate();
  return options;
}

void BindOptimizer(py::module_& m) {
  m.def("apply_gradients", &Apply, py::arg("table"), py::arg("rule"), py::arg("learning_rate"),
        py::arg("step"), py::arg("keys"), py::arg("grads"), py::kw_only(),
        py::arg("keys_are_unique") = false,
        "One optimizer step on the rows of `keys`; keywords are the fields of OptimizerOptions.");
}

}  // namespace sok
