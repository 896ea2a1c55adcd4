// The lookup of one process in device tables, and its gradient.
//
//     for each table     check, unique          on the device
//     once               how many unique keys, or what is wrong      to the host: the op waits here
//     for each table     find or insert -> row numbers -> combine    on the device
//
// The host has to know the number of unique keys, for it is a shape. It learns in the same copy
// whether a batch is bad, so nothing of a bad batch has gone into any table.
#include <vector>

#include "cpp/core/cuda/check.h"
#include "cpp/core/cuda/combine.h"
#include "cpp/core/cuda/unique.h"
#include "cpp/tf/cuda/batch.h"
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/cuda/observed.h"
#include "cpp/tf/samples.h"

namespace sok {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

// What the host learns of a table's batch.
struct Learnt {
  cuda::BatchFinding finding;
  uint32_t num_unique;
};

class DeviceLookupOp : public OpKernel {
 public:
  explicit DeviceLookupOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, features_.Init(ctx));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<DeviceTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    OpInputList keys, row_splits, weights;
    OP_REQUIRES_OK(ctx, ctx->input_list("keys", &keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    OpOutputList embeddings, unique_keys, inverse;
    OP_REQUIRES_OK(ctx, ctx->output_list("embeddings", &embeddings));
    OP_REQUIRES_OK(ctx, ctx->output_list("unique_keys", &unique_keys));
    OP_REQUIRES_OK(ctx, ctx->output_list("inverse", &inverse));
    const int n = keys.size();
    OP_REQUIRES_OK(ctx, features_.CheckShapes(keys, row_splits, weights));
    std::vector<Tensor> uniques(n);
    for (int i = 0; i < n; ++i) {
      Tensor* unused;
      OP_REQUIRES_OK(ctx, inverse.allocate(i, keys[i].shape(), &unused));
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64,
                                             TensorShape({keys[i].NumElements()}), &uniques[i]));
    }
    std::vector<Learnt> learnt(n);
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                     Learnt* const on_device = workspace.Take<Learnt>(n);
                     std::vector<cuda::BatchInput> inputs(n);
                     for (int i = 0; i < n; ++i) {
                       inputs[i] = BatchInputOf(features_, i, keys[i], row_splits[i]);
                       cuda::CheckBatch(stream, inputs[i], &on_device[i].finding);
                       cuda::Unique(stream, workspace, inputs[i].keys, inputs[i].num_keys,
                                    Keys(&uniques[i]), inverse[i]->flat<int32_t>().data(),
                                    &on_device[i].num_unique);
                     }
                     cuda::CopyToHost(stream, learnt.data(), on_device, n * sizeof(Learnt));
                     for (int i = 0; i < n; ++i) {
                       cuda::RefuseFound(stream, inputs[i], learnt[i].finding);
                     }
                   }));
    if (insert_) {
      ObservedDeviceKeys observed(tables);
      for (int i = 0; i < n; ++i) observed.Add(i, Keys(uniques[i]), learnt[i].num_unique);
      OP_REQUIRES_OK(ctx, observed.Observe(ctx));
    }
    for (int i = 0; i < n; ++i) {
      const int64_t num_unique = learnt[i].num_unique;
      unique_keys.set(i, uniques[i].Slice(0, num_unique));
      Tensor* out;
      const Samples samples = features_.MakeSamples(i, *inverse[i], row_splits[i], weights[i]);
      OP_REQUIRES_OK(ctx, embeddings.allocate(i, features_.OutputShape(i, samples), &out));
      OP_REQUIRES_OK(ctx,
                     WithTable(ctx, *tables[i], [&](cuda::CudaTable& table, cuda::Stream stream) {
                       Combine(table, stream, Keys(uniques[i]), num_unique, samples,
                               out->flat<float>().data());
                     }));
    }
  }

 private:
  void Combine(cuda::CudaTable& table, cuda::Stream stream, const uint64_t* unique_keys,
               int64_t num_unique, const Samples& samples, float* out) const {
    cuda::Workspace& workspace = table.workspace();
    const cuda::Workspace::Scope scope(workspace, stream);
    if (insert_ && !table.keeps_records()) {
      uint32_t* const row_numbers = workspace.Take<uint32_t>(num_unique);
      table.FindOrInsertRows(stream, unique_keys, num_unique, row_numbers, nullptr);
      const cuda::TableRef ref = table.Ref();
      if (ref.history.now == 0) {  // rows read as they stand
        return cuda::CombineTableRows(stream, samples, ref, row_numbers, out);
      }
      float* const rows = workspace.Take<float>(num_unique * table.dim());
      table.GatherRows(stream, row_numbers, num_unique, rows);
      return cuda::CombineRows(stream, samples, rows, table.dim(), out);
    }
    float* const rows = workspace.Take<float>(num_unique * table.dim());
    table.Find(stream, unique_keys, num_unique, rows, nullptr);
    cuda::CombineRows(stream, samples, rows, table.dim(), out);
  }

  FeatureAttrs features_;
  bool insert_;
};

// Never waits.
class DeviceLookupGradOp : public OpKernel {
 public:
  explicit DeviceLookupGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, features_.Init(ctx));
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads, unique_keys, inverse, row_splits, weights;
    OP_REQUIRES_OK(ctx, ctx->input_list("grads", &grads));
    OP_REQUIRES_OK(ctx, ctx->input_list("unique_keys", &unique_keys));
    OP_REQUIRES_OK(ctx, ctx->input_list("inverse", &inverse));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_splits", &row_splits));
    OP_REQUIRES_OK(ctx, ctx->input_list("weights", &weights));
    OpOutputList row_grads;
    OP_REQUIRES_OK(ctx, ctx->output_list("row_grads", &row_grads));
    for (int i = 0; i < grads.size(); ++i) {
      const Samples samples = features_.MakeSamples(i, inverse[i], row_splits[i], weights[i]);
      OP_REQUIRES_OK(ctx, features_.CheckGradient(i, samples, grads[i]));
      const int64_t num_unique = unique_keys[i].NumElements(), dim = features_.dim(i);
      Tensor* out;
      OP_REQUIRES_OK(ctx, row_grads.allocate(i, TensorShape({num_unique, dim}), &out));
      OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                       cuda::CombineGradient(stream, workspace, samples,
                                             grads[i].flat<float>().data(), num_unique, dim,
                                             out->flat<float>().data());
                     }));
    }
  }

 private:
  FeatureAttrs features_;
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(Name("SokLookup").HostMemory("handles"), DeviceLookupOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokLookupGrad"), DeviceLookupGradOp);

}  // namespace sok
