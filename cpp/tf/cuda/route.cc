// SokRoute on the device. One copy for all tables tells the host how many keys go where and what
// the checks found; keys never leave the device.
//
//     per table   check | place | unique by owner          kernels, nothing waits
//     all tables  [owner offsets 0 .. N-1 | findings]      =one copy=> host: layout of the message
//     message     heads and keys of all ranks              one kernel
#include <cstring>

#include "cpp/core/cuda/lookup/place.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/tf/cuda/batch.h"
#include "cpp/tf/cuda/device_messages.h"
#include "cpp/tf/placements.h"

namespace sok {

class DeviceRouteOp : public FeatureOp {
 public:
  explicit DeviceRouteOp(OpKernelConstruction* ctx) : FeatureOp(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("world_size", &world_size_));
    OP_REQUIRES_OK(ctx, GetPlacements(ctx, features_, world_size_, &placements_));
  }

  void Compute(OpKernelContext* ctx) override {
    Inputs in;
    OpOutputList inverse;
    OP_REQUIRES_OK(
        ctx,
        GetLists(ctx,
                 {{"keys", &in.keys}, {"row_splits", &in.row_splits}, {"weights", &in.weights}},
                 {{"inverse", &inverse}}));
    const int64_t n = in.keys.size();
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, TensorShape({world_size_, n}), &in.counts));
    in.inverse.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      OP_REQUIRES_OK(ctx, inverse.allocate(i, in.keys[i].shape(), &in.inverse[i]));
    }
    absl::Status status = FirstProblem(ctx);
    if (status.ok()) status = features_.CheckShapes(in.keys, in.row_splits, in.weights);
    if (status.ok()) {
      status = TryWithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
        return Run(ctx, workspace, stream, in);
      });
    }
    if (status.ok()) return;
    in.counts->flat<int64_t>().setZero();
    for (Tensor* inv : in.inverse) {
      OP_REQUIRES_OK(
          ctx, Guard([&] { cuda::FillWithZeros(StreamOf(ctx), inv->data(), inv->TotalBytes()); }));
    }
    OP_REQUIRES_OK(ctx, FailAllOnDevice<int64_t>(ctx, status, Call(), world_size_));
  }

 private:
  struct Inputs {
    OpInputList keys, row_splits, weights;
    Tensor* counts;
    std::vector<Tensor*> inverse;
  };

  absl::Status Run(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                   const Inputs& in) const {
    const int64_t n = in.keys.size();
    std::vector<cuda::BatchInput> batches;
    for (int64_t i = 0; i < n; ++i) {
      batches.push_back(BatchInputOf(features_, i, in.keys[i], in.row_splits[i]));
    }
    // Both in one piece, for one copy: [n, world_size + 1] offsets, then [n] findings.
    const int64_t num_offsets = n * (world_size_ + 1);
    constexpr int64_t kWords = sizeof(cuda::BatchFinding) / sizeof(int64_t);
    int64_t* const learned = workspace.Take<int64_t>(num_offsets + n * kWords);
    auto* const findings = reinterpret_cast<cuda::BatchFinding*>(learned + num_offsets);
    std::vector<uint64_t*> unique;
    std::vector<cuda::UniqueByOwnerBatch> routed;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t num_keys = batches[i].num_keys;
      const uint64_t* keys = batches[i].keys;
      if (!placements_.empty() && placements_[i].owner != kByKey) {
        uint64_t* const placed = workspace.Take<uint64_t>(num_keys);
        cuda::PlaceRows(stream, placements_[i], world_size_, in.keys[i].flat<int64_t>().data(),
                        num_keys, placed);
        keys = placed;
      }
      unique.push_back(workspace.Take<uint64_t>(num_keys));
      routed.push_back(
          {keys, num_keys, unique[i], Places(in.inverse[i]), learned + i * (world_size_ + 1)});
    }
    cuda::CheckBatches(stream, batches, findings);
    cuda::UniqueByOwner(stream, workspace, routed, world_size_);
    std::vector<int64_t> host(num_offsets + n * kWords);
    cuda::CopyToHost(stream, host.data(), learned, host.size() * sizeof(int64_t));
    for (int64_t i = 0; i < n; ++i) {
      cuda::BatchFinding finding;
      std::memcpy(&finding, host.data() + num_offsets + i * kWords, sizeof(finding));
      cuda::RefuseFound(stream, batches[i], finding);
    }
    return Write(ctx, workspace, stream, host, unique, in.counts);
  }

  // `offsets` [n, world_size + 1] into each table's unique keys.
  absl::Status Write(OpKernelContext* ctx, cuda::Workspace& workspace, cuda::Stream stream,
                     const std::vector<int64_t>& offsets, const std::vector<uint64_t*>& unique,
                     Tensor* counts) const {
    const int64_t n = unique.size();
    auto count = counts->matrix<int64_t>();
    constexpr int64_t kHead = kHeadWords<int64_t>;
    std::vector<int64_t> words(world_size_, kHead + n), heads;
    int64_t total = 0;
    for (int64_t r = 0; r < world_size_; ++r) {
      heads.insert(heads.end(), kHead, 0);  // SokStampCall says whose call it is
      for (int64_t i = 0; i < n; ++i) {
        const int64_t* const of_table = offsets.data() + i * (world_size_ + 1);
        count(r, i) = of_table[r + 1] - of_table[r];
        heads.push_back(count(r, i));
        words[r] += count(r, i);
      }
      TF_RETURN_IF_ERROR(BlockFits(words[r], sizeof(int64_t)));
      total += words[r];
    }
    Tensor *message, *splits;
    TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({total}), &message));
    TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({world_size_}), &splits));
    const int64_t* const device_heads = cuda::Upload(stream, workspace, heads);
    uint64_t* out = Keys(message);
    std::vector<cuda::Move<uint64_t>> moves;
    for (int64_t r = 0; r < world_size_; ++r) {
      splits->flat<int32_t>()(r) = words[r];
      moves.push_back(
          {reinterpret_cast<const uint64_t*>(device_heads + r * (kHead + n)), out, kHead + n});
      out += kHead + n;
      for (int64_t i = 0; i < n; ++i) {
        moves.push_back({unique[i] + offsets[i * (world_size_ + 1) + r], out, count(r, i)});
        out += count(r, i);
      }
    }
    cuda::MoveSegments(stream, workspace, moves);
    return absl::OkStatus();
  }

  int64_t world_size_;
  std::vector<RowPlacement> placements_;  // empty: keys go to key % world_size unchanged
};
SOK_REGISTER_DEVICE_KERNEL(
    Name("SokRoute").HostMemory("problems").HostMemory("splits").HostMemory("counts"),
    DeviceRouteOp);

}  // namespace sok
