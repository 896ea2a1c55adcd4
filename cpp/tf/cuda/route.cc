// SokRoute on the device. One copy for all tables tells the host how many keys go where and what
// the checks found; keys never leave the device.
//
//     per table   check | place | unique by owner          kernels, nothing waits
//     all tables  [owner offsets 0 .. N-1 | findings]      =one copy=> host: layout of the message
//     message     heads and keys of all ranks              one kernel
#include <cstring>

#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/tf/cuda/batch.h"
#include "cpp/tf/cuda/device_messages.h"
#include "cpp/tf/route_op.h"

namespace sok {

class DeviceRouteOp : public RouteOp {
 public:
  using RouteOp::RouteOp;

 private:
  absl::Status Group(OpKernelContext* ctx, const Batch& batch) const override {
    TF_RETURN_IF_ERROR(features_.CheckShapes(batch.in));
    return TryWithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
      return Run(ctx, workspace, stream, batch);
    });
  }

  absl::Status Fail(OpKernelContext* ctx, const absl::Status& status,
                    const Batch& batch) const override {
    TF_RETURN_IF_ERROR(Guard([&] {
      for (Tensor* inverse : batch.inverse) {
        cuda::FillWithZeros(StreamOf(ctx), inverse->data(), inverse->TotalBytes());
      }
    }));
    return FailAllOnDevice<int64_t>(ctx, status, Call(), world_size_);
  }

  absl::Status Run(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                   const Batch& batch) const {
    const FeatureInputs& in = batch.in;
    const int64_t n = batch.num_tables();
    std::vector<cuda::BatchInput> batches;
    for (int64_t i = 0; i < n; ++i) {
      batches.push_back(BatchInputOf(features_, i, in));
    }
    // One piece, for one copy of the first two parts and one fill of the last two:
    // [n, world_size + 1] offsets, [n] findings, and what UniqueByOwner needs.
    const int64_t num_offsets = n * (world_size_ + 1);
    constexpr int64_t kWords = sizeof(cuda::BatchFinding) / sizeof(int64_t);
    int64_t num_ones = 0;
    for (const cuda::BatchInput& input : batches) {
      num_ones += cuda::NumOnesByOwner(input.num_keys, world_size_);
    }
    int64_t* const learned = workspace.Take<int64_t>(num_offsets + n * kWords + (num_ones + 1) / 2);
    auto* const findings = reinterpret_cast<cuda::BatchFinding*>(learned + num_offsets);
    auto* const ones = reinterpret_cast<uint32_t*>(findings + n);
    std::vector<uint64_t*> unique;
    std::vector<cuda::UniqueByOwnerBatch> routed;
    std::vector<cuda::PlaceBatch> placing;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t num_keys = batches[i].num_keys;
      const uint64_t* keys = batches[i].keys;
      if (is_placed(i)) {
        uint64_t* const placed = workspace.Take<uint64_t>(num_keys);
        placing.push_back({placements_[i], in.keys[i].flat<int64_t>().data(), num_keys, placed});
        keys = placed;
      }
      unique.push_back(workspace.Take<uint64_t>(num_keys));
      routed.push_back(
          {keys, num_keys, unique[i], Places(batch.inverse[i]), learned + i * (world_size_ + 1)});
    }
    cuda::PlaceRows(stream, world_size_, placing);
    cuda::FillWithOnes(stream, findings, n * sizeof(cuda::BatchFinding) + num_ones * 4);
    cuda::CheckBatches(stream, batches, findings);
    cuda::UniqueByOwner(stream, workspace, routed, world_size_, ones);
    std::vector<int64_t> host(num_offsets + n * kWords);
    cuda::CopyToHost(stream, host.data(), learned, host.size() * sizeof(int64_t));
    for (int64_t i = 0; i < n; ++i) {
      cuda::BatchFinding finding;
      std::memcpy(&finding, host.data() + num_offsets + i * kWords, sizeof(finding));
      cuda::RefuseFound(stream, batches[i], finding);
    }
    ObserveBatches(stream, batches);
    return Write(ctx, workspace, stream, host, unique, batch.counts);
  }

  // `offsets` [n, world_size + 1] into each table's unique keys.
  absl::Status Write(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                     const std::vector<int64_t>& offsets, const std::vector<uint64_t*>& unique,
                     Tensor* counts) const {
    const int64_t n = unique.size();
    auto count = counts->matrix<int64_t>();
    constexpr int64_t kHead = kHeadWords<int64_t>;
    std::vector<int64_t> words(world_size_, kHead + n), heads;
    for (int64_t r = 0; r < world_size_; ++r) {
      heads.insert(heads.end(), kHead, 0);  // SokStampCall says whose call it is
      for (int64_t i = 0; i < n; ++i) {
        const int64_t* const of_table = offsets.data() + i * (world_size_ + 1);
        count(r, i) = of_table[r + 1] - of_table[r];
        heads.push_back(count(r, i));
        words[r] += count(r, i);
      }
    }
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, words));
    uint64_t* out = Keys(&made.message);
    cuda::SegmentList list;
    const int64_t kept = list.Keep(heads.data(), static_cast<int64_t>(heads.size()));
    for (int64_t r = 0; r < world_size_; ++r) {
      list.MoveKept(kept + r * (kHead + n), out, kHead + n);
      out += kHead + n;
      for (int64_t i = 0; i < n; ++i) {
        const uint64_t* const keys = unique[i] + offsets[i * (world_size_ + 1) + r];
        list.Move(keys, out, count(r, i));
        out += count(r, i);
      }
    }
    // Where the rows will be: SokCombine and its gradient need it.
    const RowLayout layout(*counts, features_.dims());
    Tensor starts;
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(tensorflow::DT_INT64, TensorShape({layout.num_rows()}), &starts));
    int64_t* to = starts.flat<int64_t>().data();
    for (int i = 0; i < n; ++i) {
      WriteRowStarts(layout, i, to, &list);
      to += layout.num_rows(i);
    }
    list.Run(stream, workspace);
    made.Set(ctx);
    ctx->set_output(kInverse + n, starts);
    return absl::OkStatus();
  }
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokRoute").HostMemory("problems").HostMemory("splits").HostMemory("counts"),
    DeviceRouteOp);

}  // namespace sok
