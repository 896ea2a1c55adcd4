// Makes a table log what changes after a dump.
#include "cpp/tf/common.h"

namespace sok {
namespace {

REGISTER_OP("SokTableKeepChanges")
    .Input("handle: resource")
    .Input("keep: bool")
    .Output("number: int64")
    .SetShapeFn(ScalarShape)
    .SetIsStateful()
    .Doc("Where `keep`, the table keeps what changes from here on; the number of this instant.");

absl::Status KeepChanges(OpKernelContext* ctx) {
  const bool keep = ctx->input(1).scalar<bool>()();
  return SetNumberOfTable(ctx, [keep](Table& table, CallContext context) {
    return keep ? table.KeepChanges(context) : int64_t{0};
  });
}
SOK_REGISTER_TABLE_KERNEL(
    Name("SokTableKeepChanges").HostMemory("handle").HostMemory("keep").HostMemory("number"),
    FunctionOp<KeepChanges>);

}  // namespace
}  // namespace sok
