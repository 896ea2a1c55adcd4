// Rows in and out of one device table by key: find, assign, export, import.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/cuda/snapshot.h"
#include "cpp/tf/snapshots.h"

namespace sok {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

class DeviceTableFindOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    Tensor *rows, *found;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n, table->options().dim}), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({n}), &found));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     t.Find(stream, Keys(keys), n, rows->flat<float>().data(),
                            reinterpret_cast<uint8_t*>(found->flat<bool>().data()));
                   }));
  }
};

class DeviceTableAssignOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    const Tensor &keys = ctx->input(1), &rows = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckRowsShape("rows", keys, rows, table->options()));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     t.Assign(stream, Keys(keys), keys.NumElements(), rows.flat<float>().data());
                   }));
  }
};

class DeviceFindRowsOp : public OpKernel {
 public:
  explicit DeviceFindRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    OP_REQUIRES(ctx, table->options().dim == dim_,
                absl::InvalidArgumentError(absl::StrCat(
                    "dim must be the table's, ", table->options().dim, ". Received: ", dim_)));
    const Tensor& keys = ctx->input(1);
    const int64_t n = keys.NumElements();
    Tensor *rows, *problem;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({n, dim_}), &rows));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &problem));
    float* const out = rows->flat<float>().data();
    const absl::Status status =
        WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
          if (insert_) {
            t.FindOrInsert(stream, Keys(keys), n, out, nullptr);
          } else {
            t.Find(stream, Keys(keys), n, out, nullptr);
          }
        });
    if (status.ok()) return;
    OP_REQUIRES_OK(ctx,
                   Guard([&] { cuda::FillWithZeros(StreamOf(ctx), out, rows->TotalBytes()); }));
    problem->scalar<tensorflow::tstring>()() = std::string(status.message());
  }

 private:
  int64_t dim_;
  bool insert_;
};

class DeviceTableExportOp : public OpKernel {
 public:
  explicit DeviceTableExportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_slots", &with_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict_));
  }
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     snapshot = ExportSnapshot(t, stream, with_slots_, evict_);
                   }));
    OP_REQUIRES_OK(ctx, WriteSnapshot(ctx, snapshot, table->options().dim));
  }

 private:
  bool with_slots_, evict_;
};

class DeviceTableImportOp : public OpKernel {
 public:
  explicit DeviceTableImportOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("replace", &replace_));
  }
  void Compute(OpKernelContext* ctx) override {
    DeviceTablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, 0, &table));
    TableSnapshot snapshot;
    OP_REQUIRES_OK(ctx, ReadSnapshot(ctx, table->options(), replace_, &snapshot));
    OP_REQUIRES_OK(ctx, WithTable(ctx, *table, [&](cuda::CudaTable& t, cuda::Stream stream) {
                     ImportSnapshot(t, stream, snapshot, replace_);
                   }));
  }

 private:
  bool replace_;
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(Name("SokTableFind").HostMemory("handle"), DeviceTableFindOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableAssign").HostMemory("handle"), DeviceTableAssignOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokFindRows").HostMemory("handle").HostMemory("problem"),
                           DeviceFindRowsOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableExport")
                               .HostMemory("handle")
                               .HostMemory("keys")
                               .HostMemory("rows")
                               .HostMemory("slot_rows")
                               .HostMemory("slot_names")
                               .HostMemory("slot_widths")
                               .HostMemory("records")
                               .HostMemory("waiting")
                               .HostMemory("counters")
                               .HostMemory("step"),
                           DeviceTableExportOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokTableImport")
                               .HostMemory("handle")
                               .HostMemory("keys")
                               .HostMemory("rows")
                               .HostMemory("slot_rows")
                               .HostMemory("slot_names")
                               .HostMemory("slot_widths")
                               .HostMemory("records")
                               .HostMemory("waiting")
                               .HostMemory("counters")
                               .HostMemory("step"),
                           DeviceTableImportOp);

}  // namespace sok
