// SokTableHandle for any kind of table: the op's attributes, and the kernel that makes the
// resource.
#ifndef SOK_TF_TABLE_HANDLE_H_
#define SOK_TF_TABLE_HANDLE_H_

#include <string>

#include "cpp/core/table_options.h"
#include "cpp/tf/common.h"

namespace sok {

class TableAttrs {
 public:
  absl::Status Init(OpKernelConstruction* ctx);
  // With the seed that sok.Init has set; an error before that.
  absl::Status Options(TableOptions* options) const;

  const std::string& container() const { return container_; }
  const std::string& shared_name() const { return shared_name_; }

 private:
  TableOptions options_;
  std::string container_, shared_name_;
  uint64_t initializer_seed_ = 0;
};

// `Resource(ctx, options)` makes the table, in its memory; what it throws fails the op.
template <typename Resource>
class TableHandleOp : public OpKernel {
 public:
  explicit TableHandleOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, attrs_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    auto creator = [&](TableResource** resource) {
      TableOptions options;
      TF_RETURN_IF_ERROR(attrs_.Options(&options));
      return Guard([&] { *resource = new Resource(ctx, options); });
    };
    const std::string& container = attrs_.container();
    const tensorflow::ResourceHandle handle = tensorflow::MakeResourceHandle<TableResource>(
        ctx, container.empty() ? ctx->resource_manager()->default_container() : container,
        attrs_.shared_name());
    TablePtr table;
    OP_REQUIRES_OK(ctx,
                   tensorflow::LookupOrCreateResource<TableResource>(ctx, handle, &table, creator));
    OP_REQUIRES_OK(ctx, SetScalar(ctx, 0, handle));
  }

 private:
  TableAttrs attrs_;
};

}  // namespace sok

#endif  // SOK_TF_TABLE_HANDLE_H_
