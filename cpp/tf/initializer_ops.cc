// Describes the rows that a table's missing keys read, for lookups that run without this library.
#include <algorithm>

#include "cpp/core/hash.h"
#include "cpp/core/initializer.h"
#include "cpp/tf/common.h"

namespace sok {
namespace {

REGISTER_OP("SokTableInitializer")
    .Input("handle: resource")
    .Output("kind: int64")
    .Output("philox_key: int64")
    .Output("numbers: float")
    .Output("default_rows: float")
    .Output("is_row: bool")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return SetShapes(c, {{}, {2}, {4}, {-1, -1}, {}}); })
    .Doc(
        "Describes what a missing key reads. kind is an InitializerKind; philox_key holds the two "
        "words of the Philox key; numbers holds a, scale, limit and the factor by which weight "
        "decay multiplies the row; default_rows has shape [num_default_rows, dim]. If is_row is "
        "true, this is an initial row, rounded to the dtype of the table's rows. It is false if "
        "the table admits keys by a filter: kind is then constant, with the value for keys without "
        "permission.");

absl::Status Describe(OpKernelContext* ctx) {
  TablePtr table;
  TF_RETURN_IF_ERROR(LookupTable(ctx, &table));
  const TableOptions& options = table->options();
  Initializer init =
      MakeInitializer(options.initializer, options.seed,
                      HashName(options.name.data(), options.name.size()), options.dim);
  double decay = 1.0;
  const bool filters = table->table().filters();
  if (filters) {
    init.kind = InitializerKind::kConstant;
    init.a = options.policy.no_permission;
  } else {
    TF_RETURN_IF_ERROR(table->Run(
        ctx, [&](CallContext context) { decay = table->table().InitialRowScale(context); }));
  }
  const bool has_rows = init.kind == InitializerKind::kDefaultRows;
  const int64_t num_rows = has_rows ? init.num_default_rows : 0;
  Tensor* rows;
  TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({num_rows, options.dim}), &rows));
  std::copy_n(init.default_rows, num_rows * options.dim, rows->flat<float>().data());
  TF_RETURN_IF_ERROR(SetScalar(ctx, 4, !filters));
  TF_RETURN_IF_ERROR(SetScalar(ctx, 0, static_cast<int64_t>(init.kind)));
  TF_RETURN_IF_ERROR(SetVector<int64_t>(ctx, 1, {init.philox_key0, init.philox_key1}));
  return SetVector(ctx, 2,
                   std::vector<float>{init.a, init.scale, init.limit, static_cast<float>(decay)});
}
SOK_REGISTER_TABLE_KERNEL(Name("SokTableInitializer")
                              .HostMemory("handle")
                              .HostMemory("kind")
                              .HostMemory("philox_key")
                              .HostMemory("numbers")
                              .HostMemory("default_rows")
                              .HostMemory("is_row"),
                          FunctionOp<Describe>);

}  // namespace
}  // namespace sok
