// SokGatherRows and SokMergeGrads on the device: what an owner does for all ranks.
//
// A table's keys of all ranks are found together. Rows go directly from the table to their places
// in the message, and gradients are summed directly from theirs. The host reads the messages'
// heads, in one launch. What one kernel of SokGatherRows writes for this, SokMergeGrads needs too:
//
//     unique_keys[i]   keys of all ranks [num_keys] | where their rows begin [num_keys]
//     inverse[0]       [n, world_size] the first key of each rank; the others are empty
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/merge_keys.h"
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

// begins [tables, world_size]: of a table's keys, the first of each rank.
void WriteBegins(const RowLayout& layout, uint32_t* begins, cuda::SegmentList* list) {
  const int64_t count = layout.num_tables() * layout.world_size();
  std::vector<int64_t> words((count + 1) / 2);
  auto* to = reinterpret_cast<uint32_t*>(words.data());
  for (int i = 0; i < layout.num_tables(); ++i) {
    int64_t begin = 0;
    for (int64_t r = 0; r < layout.world_size(); ++r) {
      *to++ = static_cast<uint32_t>(begin);
      begin += layout.count(r, i);
    }
  }
  list->MoveKept(list->Keep(words.data(), static_cast<int64_t>(words.size())), begins, count);
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
    absl::Status read = Guard([&] {
      const cuda::Stream stream = StreamOf(ctx);
      heads = cuda::Heads(stream, words, lengths, world_size_, num_words);
      if (AllGood(heads, lengths, world_size_)) return;
      std::vector<int64_t> whole(message.NumElements());
      cuda::CopyToHost(stream, whole.data(), words, message.TotalBytes());
      ThrowIfFailed(whole.data(), lengths, world_size_);
    });
    // A rank's failure reached every rank in this message: all raise it here.
    OP_REQUIRES_OK(ctx, RaisedByRank(read));
    OP_REQUIRES_OK(ctx, SetOutput(ctx, 2, TensorShape({world_size_, num_words}), heads));
    Segments segments;
    OP_REQUIRES_OK(ctx,
                   CutByHeads(*ctx->mutable_output(2), message, splits, world_size_, n, &segments));
    const Call call = ReadHead(heads.data()).At(Stage::kRows);
    absl::Status status = Write(ctx, tables, segments, call);
    if (status.ok()) return;
    OP_REQUIRES_OK(ctx, SetEmpty(ctx, 3, 2 * n));
    OP_REQUIRES_OK(ctx, FailAllOnDevice<float>(ctx, status, call, world_size_));
  }

 private:
  absl::Status Write(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                     const Segments& segments, const Call& call) const {
    std::vector<int64_t> dims;
    for (const DeviceTablePtr& table : tables) dims.push_back(table->options().dim);
    const RowLayout layout(segments, dims);
    const int n = layout.num_tables();
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, layout.words()));
    std::vector<Tensor> kept(2 * n);  // for SokMergeGrads
    for (int i = 0; i < n; ++i) {
      TF_RETURN_IF_ERROR(ctx->allocate_temp(tensorflow::DT_INT64,
                                            TensorShape({2 * layout.num_rows(i)}), &kept[i]));
      const int64_t num_begins = i == 0 ? n * world_size_ : 0;
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(tensorflow::DT_UINT32, TensorShape({num_begins}), &kept[n + i]));
    }
    TF_RETURN_IF_ERROR(WithTables(ctx, tables, [&](cuda::Stream stream) {
      if (n > 0) Gather(stream, tables, segments, layout, call, &made.message, &kept);
    }));
    made.Set(ctx);
    for (int i = 0; i < 2 * n; ++i) ctx->set_output(3 + i, kept[i]);
    return absl::OkStatus();
  }

  // Under the tables' mutexes.
  void Gather(cuda::Stream stream, const std::vector<DeviceTablePtr>& tables,
              const Segments& segments, const RowLayout& layout, const Call& call, Tensor* message,
              std::vector<Tensor>* kept) const {
    cuda::Workspace& workspace = tables[0]->table().workspace();
    const cuda::Workspace::Scope scope(workspace, stream);
    float* const out = message->flat<float>().data();
    cuda::SegmentList list;
    WriteHeads(call, layout, out, &list);
    WriteBegins(layout, (*kept)[tables.size()].flat<uint32_t>().data(), &list);
    // One job per table, however many ranks its rows go to.
    std::vector<CudaTable::TableFind> finds;
    std::vector<CudaTable::TableKeys> inserts;
    std::vector<CudaTable::TableRows> gathers;
    for (size_t i = 0; i < tables.size(); ++i) {
      CudaTable& table = tables[i]->table();
      const int64_t num_keys = layout.num_rows(i);
      uint64_t* const keys = Keys(&(*kept)[i]);
      int64_t* const starts = (*kept)[i].flat<int64_t>().data() + num_keys;
      CollectKeys(segments, i, keys, &list);
      WriteRowStarts(layout, i, starts, &list);
      const cuda::RowPlaces rows(out, starts, layout.IsAligned(i));
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
    const Tensor &message = ctx->input(2), &splits = ctx->input(3);
    const int n = dims_.size();
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    OP_REQUIRES_OK(ctx, CheckSplits(grads, grad_splits, world_size_));
    Segments segments;
    OP_REQUIRES_OK(ctx, CutByHeads(ctx->input(4), message, splits, world_size_, n, &segments));
    const RowLayout layout(segments, dims_);
    OP_REQUIRES_OK(ctx, layout.CheckGradients(grad_splits));
    std::vector<Tensor> kept;
    for (int i = 0; i < 2 * n; ++i) kept.push_back(ctx->input(5 + i));
    for (int i = 0; i < n; ++i) {
      OP_REQUIRES(ctx,
                  kept[i].NumElements() == 2 * layout.num_rows(i) &&
                      kept[n].NumElements() == n * world_size_,
                  absl::InvalidArgumentError(
                      "row_keys and inverse must be those of SokGatherRows for the same message"));
    }
    OP_REQUIRES_OK(ctx, TryWithWorkspace(ctx, [&](cuda::Workspace& ws, cuda::Stream stream) {
                     return Merge(ctx, ws, stream, grads, layout, kept);
                   }));
  }

 private:
  absl::Status Merge(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                     const Tensor& grads, const RowLayout& layout,
                     const std::vector<Tensor>& kept) const {
    const int64_t n = dims_.size();
    std::vector<Tensor> unique(n);
    std::vector<cuda::MergeBatch> batches;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t num_keys = layout.num_rows(i);
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({num_keys}), &unique[i]));
      batches.push_back({Keys(kept[i]), num_keys, kept[n].flat<uint32_t>().data() + i * world_size_,
                         Keys(&unique[i])});
    }
    const cuda::MergedKeys keys = cuda::MergeKeys(stream, workspace, batches, world_size_);
    std::vector<cuda::ScatteredSumBatch> sums;
    int64_t first = 0, first_row = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t num_keys = layout.num_rows(i), count = keys.num_unique[i];
      Tensor* merged;
      TF_RETURN_IF_ERROR(ctx->allocate_output(n + i, TensorShape({count, dims_[i]}), &merged));
      ctx->set_output(i, unique[i].Slice(0, count));
      sums.push_back({keys.rows + first, keys.positions + first, num_keys,
                      static_cast<uint32_t>(first_row), grads.flat<float>().data(),
                      kept[i].flat<int64_t>().data() + num_keys, dims_[i],
                      merged->flat<float>().data(), layout.IsAligned(i)});
      first += num_keys;
      first_row += count;
    }
    cuda::SumScatteredRows(stream, workspace, sums, scale_);
    return absl::OkStatus();
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokMergeGrads").HostMemory("grad_splits").HostMemory("splits").HostMemory("heads"),
    DeviceMergeGradsOp);

}  // namespace sok
