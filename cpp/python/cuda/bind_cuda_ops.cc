// Routing, combining and optimizer steps on device arrays.
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/python/cuda/bind_cuda.h"

namespace py = pybind11;

namespace sok {
namespace {

using cuda::CudaTable;
using cuda::Stream;

// Scratch of the calls below, for one Python thread at a time (they hold the interpreter's lock).
// Never freed: device memory must not be freed while the process exits.
cuda::Workspace& SharedWorkspace() {
  static cuda::Workspace* const workspace = new cuda::Workspace;
  return *workspace;
}

void CudaApply(CudaTable& table, const std::string& rule, float learning_rate, int64_t step,
               const py::object& keys, const py::object& grads, bool keys_are_unique,
               uint64_t stream_address, const py::kwargs& keywords) {
  const Stream stream = StreamOf(stream_address);
  const OptimizerOptions options = OptionsFromKeywords(rule, keywords);
  const DeviceView key_view = DeviceKeys(table, keys, stream);
  const DeviceView grad_view(grads, "grads", {"<f4"}, {key_view.length(), table.dim()}, stream);
  const TableLock lock(table);
  cuda::ApplyGradients(
      stream, {{&table, key_view.as<uint64_t>(), grad_view.as<float>(), key_view.length()}},
      options, learning_rate, step, keys_are_unique);
}

void CudaApplyToRows(CudaTable& table, const std::string& rule, float learning_rate, int64_t step,
                     const py::object& row_numbers, const py::object& grads,
                     uint64_t stream_address, const py::kwargs& keywords) {
  const Stream stream = StreamOf(stream_address);
  const OptimizerOptions options = OptionsFromKeywords(rule, keywords);
  const DeviceView rows(row_numbers, "row_numbers", {"<u4"}, {-1}, stream);
  const DeviceView grad_view(grads, "grads", {"<f4"}, {rows.length(), table.dim()}, stream);
  const TableLock lock(table);
  cuda::ApplyGradientsToRows(stream, table, options, learning_rate, step, rows.as<uint32_t>(),
                             grad_view.as<float>(), rows.length());
}

py::tuple CudaUnique(const py::object& keys, int64_t world_size, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const DeviceView key_view(keys, "keys", {"<i8", "<u8"}, {-1}, stream);
  const int64_t num_keys = key_view.length();
  auto unique =
      std::make_unique<CudaArray>(std::vector<int64_t>{num_keys}, key_view.type(), stream);
  auto inverse = std::make_unique<CudaArray>(std::vector<int64_t>{num_keys}, "<i4", stream);
  auto offsets = std::make_unique<CudaArray>(
      std::vector<int64_t>{world_size < 0 ? 1 : world_size + 1}, "<i8", stream);
  cuda::UniqueByOwner(stream, SharedWorkspace(),
                      {{key_view.as<uint64_t>(), num_keys, unique->as<uint64_t>(),
                        inverse->as<int32_t>(), offsets->as<int64_t>()}},
                      world_size);
  int64_t num_unique = 0;
  cuda::CopyToHost(stream, &num_unique, offsets->as<int64_t>() + world_size, sizeof(num_unique));
  unique->Shorten(num_unique);
  return py::make_tuple(std::move(unique), std::move(inverse), std::move(offsets));
}

// A new array of floats.
std::unique_ptr<CudaArray> NewFloatsOn(Stream stream, int64_t num_rows, int64_t dim) {
  return std::make_unique<CudaArray>(std::vector<int64_t>{num_rows, dim}, "<f4", stream);
}

// The arguments of a combine call. Values on the device are not checked.
struct SampleViews {
  Samples samples;
  std::vector<DeviceView> views;  // what `samples` points to

  SampleViews(const py::object& inverse, const py::object& row_splits, const std::string& combiner,
              const py::object& weights, Stream stream) {
    samples.combiner = ParseCombiner(combiner);
    views.push_back(DeviceView(inverse, "inverse", {"<i4"}, {-1}, stream));
    samples.inverse = views.back().as<int32_t>();
    samples.num_keys = views.back().length();
    if ((samples.combiner == Combiner::kNone) != row_splits.is_none()) {
      throw py::value_error("`row_splits` must be given unless the combiner is 'none'. Received: " +
                            combiner);
    }
    if (!row_splits.is_none()) {
      views.push_back(DeviceView(row_splits, "row_splits", {"<i8"}, {-1}, stream));
      const DeviceView& splits = views.back();
      if (splits.length() < 1) throw py::value_error("`row_splits` must have shape [batch + 1]");
      samples.row_splits = splits.as<int64_t>();
      samples.batch = splits.length() - 1;
    }
    if (!weights.is_none()) {
      views.push_back(DeviceView(weights, "weights", {"<f4"}, {samples.num_keys}, stream));
      samples.weights = views.back().as<float>();
    }
  }
};

std::unique_ptr<CudaArray> CudaCombine(const py::object& rows, const py::object& inverse,
                                       const py::object& row_splits, const std::string& combiner,
                                       const py::object& weights, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const SampleViews views(inverse, row_splits, combiner, weights, stream);
  const DeviceView row_view(rows, "rows", {"<f4"}, {-1, -1}, stream);
  const int64_t dim = row_view.length(1);
  auto out = NewFloatsOn(stream, views.samples.num_samples(), dim);
  cuda::CombineRows(stream, {{views.samples, row_view.as<float>(), dim, out->as<float>()}});
  return out;
}

std::unique_ptr<CudaArray> CudaCombineOfTable(CudaTable& table, const py::object& row_numbers,
                                              const py::object& inverse,
                                              const py::object& row_splits,
                                              const std::string& combiner,
                                              const py::object& weights, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const SampleViews views(inverse, row_splits, combiner, weights, stream);
  const DeviceView numbers(row_numbers, "row_numbers", {"<u4"}, {-1}, stream);
  auto out = NewFloatsOn(stream, views.samples.num_samples(), table.dim());
  const TableLock lock(table);
  const cuda::TableRef ref = table.Ref(stream);
  if (ref.history.now == 0 && !table.keeps_records()) {
    cuda::CombineRows(stream, {{views.samples, ref, numbers.as<uint32_t>(), out->as<float>()}});
    return out;
  }
  // Rows that owe steps are brought up once each while they are copied; waiting keys have no row.
  const cuda::Workspace::Scope scope(table.workspace(), stream);
  float* const rows = table.workspace().Take<float>(numbers.length() * table.dim());
  table.GatherRows(stream, numbers.as<uint32_t>(), numbers.length(), rows);
  cuda::CombineRows(stream, {{views.samples, rows, table.dim(), out->as<float>()}});
  return out;
}

std::unique_ptr<CudaArray> CudaCombineGradient(const py::object& grad, const py::object& inverse,
                                               const py::object& row_splits, int64_t num_unique,
                                               const std::string& combiner,
                                               const py::object& weights, uint64_t stream_address) {
  const Stream stream = StreamOf(stream_address);
  const SampleViews views(inverse, row_splits, combiner, weights, stream);
  const DeviceView grad_view(grad, "grad", {"<f4"}, {views.samples.num_samples(), -1}, stream);
  const int64_t dim = grad_view.length(1);
  auto out = NewFloatsOn(stream, num_unique, dim);
  cuda::CombineGradient(
      stream, SharedWorkspace(),
      {{views.samples, grad_view.as<float>(), num_unique, dim, out->as<float>()}});
  return out;
}

}  // namespace

void BindCudaOps(py::module_& m) {
  m.def("cuda_apply_gradients", &CudaApply, py::arg("table"), py::arg("rule"),
        py::arg("learning_rate"), py::arg("step"), py::arg("keys"), py::arg("grads"), py::kw_only(),
        py::arg("keys_are_unique") = false, py::arg("stream") = 0,
        "One optimizer step on the rows of `keys`; keywords are the fields of OptimizerOptions.");
  m.def("cuda_apply_gradients_to_rows", &CudaApplyToRows, py::arg("table"), py::arg("rule"),
        py::arg("learning_rate"), py::arg("step"), py::arg("row_numbers"), py::arg("grads"),
        py::kw_only(), py::arg("stream") = 0,
        "The same by row number. Row numbers must not repeat.");
  m.def("cuda_unique_with_inverse", &CudaUnique, py::arg("keys"), py::arg("world_size") = 1,
        py::kw_only(), py::arg("stream") = 0,
        "Unique keys by owner, then by first occurrence; inverse; owner_offsets. Waits.");
  m.def("cuda_combine", &CudaCombine, py::arg("rows"), py::arg("inverse"), py::arg("row_splits"),
        py::arg("combiner") = "sum", py::arg("weights") = py::none(), py::kw_only(),
        py::arg("stream") = 0, "Rows of each sample reduced to one.");
  m.def("cuda_combine_of_table", &CudaCombineOfTable, py::arg("table"), py::arg("row_numbers"),
        py::arg("inverse"), py::arg("row_splits"), py::arg("combiner") = "sum",
        py::arg("weights") = py::none(), py::kw_only(), py::arg("stream") = 0,
        "The same straight from a table, by row number.");
  m.def("cuda_combine_gradient", &CudaCombineGradient, py::arg("grad"), py::arg("inverse"),
        py::arg("row_splits"), py::arg("num_unique"), py::arg("combiner") = "sum",
        py::arg("weights") = py::none(), py::kw_only(), py::arg("stream") = 0,
        "Gradient of `cuda_combine` by unique row: [num_unique, dim].");
}

}  // namespace sok
