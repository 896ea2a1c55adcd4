// Tables that keep what changed since a dump.
#include "cpp/tf/common.h"

namespace sok {

REGISTER_OP("SokTableKeepChanges")
    .Input("handle: resource")
    .Input("keep: bool")
    .Output("number: int64")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return absl::OkStatus();
    })
    .SetIsStateful()
    .Doc("Where `keep`, the table keeps what changes from here on; the number of this instant.");

class TableKeepChangesOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    int64_t kept = 0;
    if (ctx->input(1).scalar<bool>()()) {
      OP_REQUIRES_OK(ctx, table->Run(ctx, [&](CallContext context) {
        kept = table->table().KeepChanges(context);
      }));
    }
    Tensor* number;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &number));
    number->scalar<int64_t>()() = kept;
  }
};
SOK_REGISTER_TABLE_KERNEL(
    Name("SokTableKeepChanges").HostMemory("handle").HostMemory("keep").HostMemory("number"),
    TableKeepChangesOp);

}  // namespace sok
