// SokGatherRows and SokMergeGrads on the device: what an owner does for all ranks.
//
// A table's keys of all ranks are found together. Rows go directly from the table to their places
// in the message, and gradients are summed directly from theirs. The host reads the messages'
// heads, in one copy.
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/tf/cuda/device_messages.h"

namespace sok {

using cuda::CudaTable;

namespace {

// Brings a table's keys of all ranks together, in rank order.
void CollectKeys(const Segments& segments, int64_t table, uint64_t* to, cuda::SegmentList* list) {
  for (const auto& of_rank : segments) {
    list->Move(of_rank[table].keys, to, of_rank[table].num_keys);
    to += of_rank[table].num_keys;
  }
}

}  // namespace

class DeviceGatherRowsOp : public RankOp {
 public:
  explicit DeviceGatherRowsOp(OpKernelConstruction* ctx) : RankOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<DeviceTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    const int64_t n = tables.size();
    const Tensor& message = ctx->input(n);
    const Tensor& splits = ctx->input(n + 1);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    const int64_t* const words = message.flat<int64_t>().data();
    const int32_t* const lengths = splits.flat<int32_t>().data();
    const int64_t num_words = kHeadWords<int64_t> + n;
    std::vector<int64_t> heads;
    absl::Status read = WithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
      heads = cuda::Heads(stream, ws, words, lengths, world_size_, num_words);
      if (AllGood(heads, lengths, world_size_)) return;
      std::vector<int64_t> whole(message.NumElements());
      cuda::CopyToHost(stream, whole.data(), words, message.TotalBytes());
      ThrowIfFailed(whole.data(), lengths, world_size_);
    });
    // A rank's failure reached every rank in this message: all raise it here.
    OP_REQUIRES_OK(ctx, RaisedByRank(read));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, 2, TensorShape({world_size_, num_words}), heads));
    OP_REQUIRES_OK(ctx, SetEmpty(ctx, 3, 2 * n));  // SokMergeGrads finds the unique keys itself
    Segments segments;
    OP_REQUIRES_OK(ctx,
                   CutByHeads(*ctx->mutable_output(2), message, splits, world_size_, n, &segments));
    const Call call = ReadHead(heads.data()).At(Stage::kRows);
    absl::Status status = Write(ctx, tables, segments, call);
    if (!status.ok()) OP_REQUIRES_OK(ctx, FailAllOnDevice<float>(ctx, status, call, world_size_));
  }

 private:
  absl::Status Write(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                     const Segments& segments, const Call& call) const {
    std::vector<int64_t> dims;
    for (const DeviceTablePtr& table : tables) dims.push_back(table->options().dim);
    const RowLayout layout(segments, dims);
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, layout.words()));
    TF_RETURN_IF_ERROR(WithTables(ctx, tables, [&](cuda::Stream stream) {
      if (tables.empty()) return;
      Gather(stream, tables, segments, layout, call, made.message.flat<float>().data());
    }));
    made.Set(ctx);
    return absl::OkStatus();
  }

  // Under the tables' mutexes.
  void Gather(cuda::Stream stream, const std::vector<DeviceTablePtr>& tables,
              const Segments& segments, const RowLayout& layout, const Call& call,
              float* out) const {
    cuda::Workspace& workspace = tables[0]->table().workspace();
    const cuda::Workspace::Scope scope(workspace, stream);
    cuda::SegmentList list;
    WriteHeads(call, layout, out, &list);
    // One job per table, however many ranks its rows go to.
    const std::vector<const int64_t*> starts = RowStarts(workspace, layout, &list);
    std::vector<CudaTable::TableFind> finds;
    std::vector<CudaTable::TableKeys> inserts;
    std::vector<CudaTable::TableRows> gathers;
    for (size_t i = 0; i < tables.size(); ++i) {
      CudaTable& table = tables[i]->table();
      const cuda::RowPlaces rows(out, starts[i], layout.IsAligned(i));
      const int64_t num_keys = layout.num_rows(i);
      uint64_t* const keys = workspace.Take<uint64_t>(num_keys);
      CollectKeys(segments, i, keys, &list);
      if (!insert_) {
        finds.push_back({&table, keys, num_keys, rows});
        continue;
      }
      uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
      inserts.push_back({&table, keys, num_keys, row_numbers});
      inserts.back().distinct = world_size_ == 1;  // a rank sends a key once
      gathers.push_back({&table, row_numbers, num_keys, rows});
    }
    list.Run(stream, workspace);
    CudaTable::FindOrInsertRows(stream, inserts);  // the last that may fail
    CudaTable::Find(stream, finds);
    CudaTable::GatherRows(stream, gathers);
  }

  bool insert_;
};
SOK_REGISTER_DEVICE_KERNEL(Name("SokGatherRows")
                               .HostMemory("handles")
                               .HostMemory("splits")
                               .HostMemory("row_splits")
                               .HostMemory("heads"),
                           DeviceGatherRowsOp);

class DeviceMergeGradsOp : public GradientOp {
 public:
  using GradientOp::GradientOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor &grads = ctx->input(0), &grad_splits = ctx->input(1);
    const Tensor &message = ctx->input(2), &splits = ctx->input(3), &heads = ctx->input(4);
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    OP_REQUIRES_OK(ctx, CheckSplits(grads, grad_splits, world_size_));
    OP_REQUIRES_OK(ctx, TryWithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     return Merge(ctx, ws, stream, grads, grad_splits, message, splits, heads);
                   }));
  }

 private:
  absl::Status Merge(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                     const Tensor& grads, const Tensor& grad_splits, const Tensor& message,
                     const Tensor& splits, const Tensor& heads) const {
    const int64_t n = dims_.size();
    Segments segments;
    TF_RETURN_IF_ERROR(CutByHeads(heads, message, splits, world_size_, n, &segments));
    const RowLayout layout(segments, dims_);
    TF_RETURN_IF_ERROR(layout.CheckGradients(grad_splits));
    // All tables' keys, one table after the other, in rank order.
    std::vector<int64_t> first(n + 1, 0);
    for (int64_t i = 0; i < n; ++i) first[i + 1] = first[i] + layout.num_rows(i);
    uint64_t* const keys = workspace.Take<uint64_t>(first[n]);
    int32_t* const inverse = workspace.Take<int32_t>(first[n]);
    uint32_t* const num_unique = workspace.Take<uint32_t>(n);
    cuda::SegmentList list;
    for (int64_t i = 0; i < n; ++i) CollectKeys(segments, i, keys + first[i], &list);
    const std::vector<const int64_t*> starts = RowStarts(workspace, layout, &list);
    list.Run(stream, workspace);
    std::vector<Tensor> unique(n);
    std::vector<cuda::UniqueBatch> batches;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t num_keys = first[i + 1] - first[i];
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({num_keys}), &unique[i]));
      batches.push_back(
          {keys + first[i], num_keys, Keys(&unique[i]), inverse + first[i], num_unique + i});
    }
    cuda::Unique(stream, workspace, batches);
    std::vector<uint32_t> host_num_unique(n);
    cuda::CopyToHost(stream, host_num_unique.data(), num_unique, n * sizeof(uint32_t));
    std::vector<cuda::ScatteredSumBatch> sums;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t count = host_num_unique[i];
      Tensor* merged;
      TF_RETURN_IF_ERROR(ctx->allocate_output(n + i, TensorShape({count, dims_[i]}), &merged));
      ctx->set_output(i, unique[i].Slice(0, count));
      sums.push_back({inverse + first[i], first[i + 1] - first[i], grads.flat<float>().data(),
                      starts[i], count, dims_[i], merged->flat<float>().data(),
                      layout.IsAligned(i)});
    }
    cuda::SumScatteredRows(stream, workspace, sums, scale_);
    return absl::OkStatus();
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokMergeGrads").HostMemory("grad_splits").HostMemory("splits").HostMemory("heads"),
    DeviceMergeGradsOp);

}  // namespace sok
