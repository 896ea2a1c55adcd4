// What a table's missing keys read, as numbers: for lookups that run without this library.
#include <algorithm>

#include "cpp/core/hash.h"
#include "cpp/core/initializer.h"
#include "cpp/tf/common.h"

namespace sok {

REGISTER_OP("SokTableInitializer")
    .Input("handle: resource")
    .Output("kind: int64")
    .Output("philox_key: int64")
    .Output("numbers: float")
    .Output("default_rows: float")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Vector(2));
      c->set_output(2, c->Vector(3));
      c->set_output(3, c->Matrix(InferenceContext::kUnknownDim, InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(
        "Of the row of a missing key: its kind, in the order of InitializerKind; the two words of "
        "the Philox key; a, scale and limit; default rows [num_default_rows, dim]. A table that "
        "admits keys by a filter has the kind constant, its value for keys without permission.");

class TableInitializerOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    const TableOptions& options = table->options();
    Initializer init =
        MakeInitializer(options.initializer, options.seed,
                        HashName(options.name.data(), options.name.size()), options.dim);
    if (table->table().filters()) {
      init.kind = InitializerKind::kConstant;
      init.a = options.policy.no_permission;
    }
    Tensor *kind, *key, *numbers, *rows;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &kind));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({2}), &key));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({3}), &numbers));
    const bool has_rows = init.kind == InitializerKind::kDefaultRows;
    const int64_t num_rows = has_rows ? init.num_default_rows : 0;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(3, TensorShape({num_rows, options.dim}), &rows));
    kind->scalar<int64_t>()() = static_cast<int64_t>(init.kind);
    key->flat<int64_t>()(0) = init.philox_key0;
    key->flat<int64_t>()(1) = init.philox_key1;
    numbers->flat<float>()(0) = init.a;
    numbers->flat<float>()(1) = init.scale;
    numbers->flat<float>()(2) = init.limit;
    std::copy_n(init.default_rows, num_rows * options.dim, rows->flat<float>().data());
  }
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableInitializer")
                              .HostMemory("handle")
                              .HostMemory("kind")
                              .HostMemory("philox_key")
                              .HostMemory("numbers")
                              .HostMemory("default_rows"),
                          TableInitializerOp);

}  // namespace sok
