// The lookup of N processes, cut at its exchanges: Route | keys | GatherRows | rows | Combine.
//
//     rank r: keys -> SokRoute -> key message =exchange=> SokGatherRows -> row message =exchange=>
//             SokCombine -> embeddings
//     back:   SokCombineGrad -> row message =exchange=> SokMergeGrads -> (keys, gradients) by owner
//
// An op that fails on data still produces a message, one that carries the reason (message.h); the
// error is raised after the exchange, on every rank.
#include <algorithm>

#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cpu/route.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/tf/messages.h"
#include "cpp/tf/owner_watch.h"
#include "cpp/tf/route_op.h"
#include "cpp/tf/row_layout.h"
#include "cpp/tf/samples.h"

namespace sok {

REGISTER_OP("SokRoute")
    .Input("keys: N * int64")
    .Input("row_splits: N * int64")
    .Input("weights: N * float")
    .Input("problems: M * string")
    .Output("message: int64")
    .Output("splits: int32")
    .Output("counts: int64")
    .Output("inverse: N * uint32")
    .Output("starts: int64")
    .Attr("N: int >= 1")
    .Attr("M: int >= 0")
    .Attr("world_size: int >= 1")
    .Attr("table_names: list(string)")
    .Attr("dims: list(int)")
    .Attr("combiners: list(string)")
    .Attr("max_hotness: list(int)")
    .Attr("key_limits: list(int)")
    .Attr("batch_multiples: list(int)")
    .Attr("owners: list(int) = []")
    .Attr("row_offsets: list(int) = []")
    .Attr("counted: list(bool) = []")
    .SetShapeFn([](InferenceContext* c) {
      int world_size, n;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      TF_RETURN_IF_ERROR(c->GetAttr("N", &n));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(world_size));
      c->set_output(2, c->Matrix(world_size, n));
      for (int i = 0; i < n; ++i) c->set_output(3 + i, c->input(i));
      c->set_output(3 + n, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(
        "Groups the unique keys of N tables by owner, in one key message. counts [world_size, N] "
        "is the number of unique keys sent to each rank; inverse [num_keys] is each key's position "
        "among its table's unique keys, which are ordered by owner. starts is empty, or in device "
        "memory where each unique key's row will begin in the row message. owners is empty if all "
        "tables "
        "are hash tables; else it has one item per table: the rank that holds all rows of a dense "
        "table, -1 if its rows are distributed over all ranks, or -2 for a hash table. Keys of a "
        "dense table are row numbers below key_limits and are sent as positions of rows; keys of a "
        "hash table are sent unchanged. If one of the problems is not empty, the message holds the "
        "first of them instead, as this rank's failure. For tables with counted, each key is sent "
        "with its number of occurrences. SokStampCall adds the number of the call.");

class HostRouteOp : public RouteOp {
 public:
  explicit HostRouteOp(OpKernelConstruction* ctx) : RouteOp(ctx) {
    if (!ctx->status().ok()) return;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("counted", &counted_));
    OP_REQUIRES(ctx, counted_.empty() || counted_.size() == static_cast<size_t>(features_.size()),
                absl::InvalidArgumentError("counted must be empty or have one item per table"));
    owners_ = std::make_unique<OwnerWatch>(features_.size(), world_size_);
    for (int i = 0; i < features_.size(); ++i) {
      if (is_placed(i)) owners_->Ignore(i);
    }
  }

 private:
  using Routes = std::vector<std::unique_ptr<Route>>;

  absl::Status Group(OpKernelContext* ctx, const Batch& batch) const override {
    TfExecutor ex(ctx);
    TF_RETURN_IF_ERROR(features_.Check(ex, batch.in));
    const int64_t n = batch.num_tables();
    std::vector<int64_t> num_keys(n);
    for (int64_t i = 0; i < n; ++i) num_keys[i] = batch.in.keys[i].NumElements();
    Routes routes(n);
    TF_RETURN_IF_ERROR(ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
      const Tensor& keys = batch.in.keys[i];
      const uint64_t* routed = Keys(keys);
      Scratch<uint64_t> placed;
      if (is_placed(i)) {
        placed = Scratch<uint64_t>(num_keys[i]);
        PlaceRows(inner, placements_[i], world_size_, keys.flat<int64_t>().data(), num_keys[i],
                  placed.get());
        routed = placed.get();
      }
      routes[i] = std::make_unique<Route>(inner, routed, num_keys[i], world_size_,
                                          Places(batch.inverse[i]));
    }));
    return Write(ctx, ex, routes, batch);
  }

  absl::Status Fail(OpKernelContext* ctx, const absl::Status& status,
                    const Batch& batch) const override {
    for (Tensor* inverse : batch.inverse) inverse->flat<uint32_t>().setZero();
    return FailAll<int64_t>(ctx, status, Call(), world_size_);
  }

  absl::Status Write(OpKernelContext* ctx, Executor& ex, const Routes& routes,
                     const Batch& batch) const {
    const int64_t n = batch.num_tables();
    std::vector<std::vector<int64_t>> occurrences(n);  // of unique keys, if they are counted
    const auto is_counted = [this](int64_t i) { return !counted_.empty() && counted_[i]; };
    auto count = batch.counts->matrix<int64_t>();
    std::vector<int64_t> words(world_size_, kHeadWords<int64_t> + n);
    std::vector<std::vector<uint64_t>> unique(n);
    for (int64_t i = 0; i < n; ++i) {
      unique[i].resize(routes[i]->num_unique());
      routes[i]->WriteUnique(ex, unique[i].data());
      const std::vector<int64_t>& offsets = routes[i]->owner_offsets();
      if (!owners_->done()) owners_->See(i, features_.table_name(i), unique[i], offsets);
      for (int64_t r = 0; r < world_size_; ++r) {
        count(r, i) = offsets[r + 1] - offsets[r];
        words[r] += count(r, i) * (is_counted(i) ? 2 : 1);
      }
      if (!is_counted(i)) continue;
      occurrences[i].resize(unique[i].size());
      const auto inverse = batch.inverse[i]->flat<uint32_t>();
      for (int64_t k = 0; k < inverse.size(); ++k) ++occurrences[i][inverse(k)];
    }
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, words));
    int64_t* out = made.message.flat<int64_t>().data();
    for (int64_t r = 0; r < world_size_; ++r) {
      WriteHead(Call(), out);  // SokStampCall says which
      out += kHeadWords<int64_t>;
      for (int64_t i = 0; i < n; ++i) *out++ = count(r, i) + (is_counted(i) ? kCounted : 0);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t first = routes[i]->owner_offsets()[r];
        out = std::copy_n(unique[i].data() + first, count(r, i), out);
        if (is_counted(i)) out = std::copy_n(occurrences[i].data() + first, count(r, i), out);
      }
    }
    made.Set(ctx);
    return absl::OkStatus();
  }

  std::vector<bool> counted_;  // empty: no table's keys are counted
  std::unique_ptr<OwnerWatch> owners_;
};
REGISTER_KERNEL_BUILDER(Name("SokRoute").Device(tensorflow::DEVICE_CPU), HostRouteOp);

REGISTER_OP("SokGatherRows")
    .Input("handles: N * resource")
    .Input("message: int64")
    .Input("splits: int32")
    .Output("rows: float")
    .Output("row_splits: int32")
    .Output("heads: int64")
    .Output("unique_keys: N * int64")
    .Output("inverse: N * uint32")
    .Attr("N: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("dims: list(int)")
    .Attr("insert: bool")
    .Attr("gradient_scale: float = 1.0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      int world_size;
      TF_RETURN_IF_ERROR(c->GetAttr("world_size", &world_size));
      c->set_output(2, c->Matrix(world_size, InferenceContext::kUnknownDim));
      for (int i = 3; i < c->num_outputs(); ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
      }
      return SetMessageShapes(c);
    })
    .Doc(
        "Rows of the keys that all ranks asked this one for, as one row message, and what "
        "SokMergeGrads needs: the heads of the key messages, in host memory, and of each table the "
        "unique keys of all ranks and the place of each key among them. Without `insert` these are "
        "empty. In device memory, unique_keys and inverse hold what its SokMergeGrads needs.");

// One table's keys in the messages of all ranks, in rank order.
struct RankKeys {
  std::vector<uint64_t> keys;
  std::vector<int64_t> occurrences;  // of each, where they are counted

  void Collect(const Segments& segments, int64_t table, bool counts) {
    int64_t num_keys = 0;
    for (const std::vector<KeySegment>& of_rank : segments) num_keys += of_rank[table].num_keys;
    keys.reserve(num_keys);
    for (const std::vector<KeySegment>& of_rank : segments) {
      const KeySegment& segment = of_rank[table];
      keys.insert(keys.end(), segment.keys, segment.keys + segment.num_keys);
      if (!counts) continue;
      occurrences.resize(keys.size(), 1);
      if (segment.occurrences == nullptr) continue;
      std::copy_n(segment.occurrences, segment.num_keys, occurrences.end() - segment.num_keys);
    }
  }
};

class GatherRowsOp : public RankOp {
 public:
  explicit GatherRowsOp(OpKernelConstruction* ctx) : RankOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<HostTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    const int64_t n = tables.size();
    const Tensor& message = ctx->input(n);
    const Tensor& splits = ctx->input(n + 1);
    Segments segments;
    // A rank's failure reached every rank in this message: all raise it here.
    OP_REQUIRES_OK(ctx, ParseKeys(message, splits, world_size_, n, &segments));
    std::vector<int64_t> heads;
    const int64_t* block = message.flat<int64_t>().data();
    for (int64_t r = 0; r < world_size_; ++r) {
      heads.insert(heads.end(), block, block + kHeadWords<int64_t> + n);
      block += splits.flat<int32_t>()(r);
    }
    const TensorShape shape({world_size_, kHeadWords<int64_t> + n});
    OP_REQUIRES_OK(ctx, SetOutput(ctx, 2, shape, heads));
    const Call call = ReadHead(message.flat<int64_t>().data()).At(Stage::kRows);
    absl::Status status = Write(ctx, tables, segments, call);
    if (status.ok()) return;
    OP_REQUIRES_OK(ctx, SetEmpty(ctx, 3, 2 * n));
    OP_REQUIRES_OK(ctx, FailAll<float>(ctx, status, call, world_size_));
  }

 private:
  absl::Status Write(OpKernelContext* ctx, const std::vector<HostTablePtr>& tables,
                     const Segments& segments, const Call& call) const {
    const int n = tables.size();
    std::vector<int64_t> dims;
    for (const HostTablePtr& table : tables) dims.push_back(table->options().dim);
    const RowLayout layout(segments, dims);
    OutputMessage made;
    TF_RETURN_IF_ERROR(made.Allocate(ctx, layout.words()));
    float* const out = made.message.flat<float>().data();
    for (int64_t r = 0; r < world_size_; ++r) WriteHead(call, out + layout.head(r));
    std::vector<int64_t> num_unique(n);  // at most
    for (int i = 0; insert_ && i < n; ++i) num_unique[i] = layout.num_rows(i);
    UniqueOutputs unique;
    TF_RETURN_IF_ERROR(unique.Allocate(ctx, num_unique));
    std::vector<FeatureLookup> lookups(n);
    TF_RETURN_IF_ERROR(Guard([&] {
      std::vector<RankKeys> keys(n);
      for (int i = 0; i < n; ++i) {
        FeatureLookup& lookup = lookups[i];
        lookup.table = &tables[i]->table();
        keys[i].Collect(segments, i, lookup.table->counts_occurrences());
        lookup.keys = keys[i].keys.data();
        lookup.occurrences = keys[i].occurrences.empty() ? nullptr : keys[i].occurrences.data();
        lookup.samples.num_keys = layout.num_rows(i);
        lookup.samples.combiner = Combiner::kNone;
        for (int64_t r = 0; r < world_size_; ++r) {
          lookup.blocks.push_back({layout.count(r, i), out + layout.start(r, i)});
        }
        unique.Place(i, &lookup);
      }
      TfExecutor ex(ctx);
      LookupGroup(ex, &lookups, insert_);
    }));
    made.Set(ctx);
    return unique.Set(ctx, lookups);
  }

  bool insert_;
};
REGISTER_KERNEL_BUILDER(Name("SokGatherRows").Device(tensorflow::DEVICE_CPU), GatherRowsOp);

REGISTER_OP("SokMergeGrads")
    .Input("grads: float")
    .Input("grad_splits: int32")
    .Input("message: int64")
    .Input("splits: int32")
    .Input("heads: int64")
    .Input("row_keys: N * int64")
    .Input("inverse: N * uint32")
    .Output("unique_keys: N * int64")
    .Output("row_grads: N * float")
    .Attr("N: int >= 1")
    .Attr("world_size: int >= 1")
    .Attr("dims: list(int)")
    .Attr("scale: float = 1.0")
    .SetShapeFn([](InferenceContext* c) {
      std::vector<int64_t> dims;
      TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
      const int n = dims.size();
      for (int i = 0; i < n; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(n + i, c->Matrix(InferenceContext::kUnknownDim, dims[i]));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Gradients that all ranks sent for this rank's rows, those of equal keys summed in rank "
        "order and scaled. row_keys and inverse are the unique_keys and inverse of SokGatherRows.");

class MergeGradsOp : public GradientOp {
 public:
  using GradientOp::GradientOp;

  void Compute(OpKernelContext* ctx) override {
    const int64_t n = dims_.size();
    const Tensor &grads = ctx->input(0), &grad_splits = ctx->input(1);
    const Tensor &message = ctx->input(2), &splits = ctx->input(3);
    OP_REQUIRES_OK(ctx, CheckSplits(grads, grad_splits, world_size_));
    OP_REQUIRES_OK(ctx, CheckSplits(message, splits, world_size_));
    Segments segments;
    OP_REQUIRES_OK(ctx, CutByHeads(ctx->input(4), message, splits, world_size_, n, &segments));
    const RowLayout layout(segments, dims_);
    OP_REQUIRES_OK(ctx, layout.CheckGradients(grad_splits));
    OpInputList row_keys, places;
    OpOutputList unique_keys, row_grads;
    OP_REQUIRES_OK(ctx, GetLists(ctx, {{"row_keys", &row_keys}, {"inverse", &places}},
                                 {{"unique_keys", &unique_keys}, {"row_grads", &row_grads}}));
    std::vector<int64_t> num_keys(n);
    std::vector<Tensor> unique(n), inverse(n);
    for (int64_t i = 0; i < n; ++i) {
      num_keys[i] = layout.num_rows(i);
      unique[i] = row_keys[i];
      inverse[i] = places[i];
      if (places[i].NumElements() == num_keys[i]) continue;
      // A lookup that inserts nothing has found every key by itself.
      const TensorShape shape({num_keys[i]});
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64, shape, &unique[i]));
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_UINT32, shape, &inverse[i]));
      OP_REQUIRES_OK(ctx, Guard([&] {
                       RankKeys keys;
                       keys.Collect(segments, i, /*counts=*/false);
                       TfExecutor ex(ctx);
                       const int64_t num_unique = UniqueKeys(ex, keys.keys.data(), num_keys[i],
                                                             Keys(&unique[i]), Places(&inverse[i]));
                       unique[i] = unique[i].Slice(0, num_unique);
                     }));
    }
    std::vector<float*> sums(n);
    for (int64_t i = 0; i < n; ++i) {
      Tensor* out;
      const TensorShape shape({unique[i].NumElements(), dims_[i]});
      OP_REQUIRES_OK(ctx, row_grads.allocate(i, shape, &out));
      sums[i] = out->flat<float>().data();
      unique_keys.set(i, unique[i]);
    }
    OP_REQUIRES_OK(ctx, ForEachTable(ctx, num_keys, [&](Executor& inner, int64_t i) {
                     Merge(inner, i, layout, grads, Places(inverse[i]), unique[i].NumElements(),
                           sums[i]);
                   }));
  }

 private:
  void Merge(Executor& ex, int64_t i, const RowLayout& layout, const Tensor& message,
             const int32_t* inverse, int64_t num_unique, float* sums) const {
    Samples samples;
    samples.combiner = Combiner::kNone;
    samples.inverse = inverse;
    const int64_t dim = dims_[i];
    for (int64_t r = 0; r < world_size_; ++r) {
      const float* const grads = message.flat<float>().data() + layout.start(r, i);
      samples.num_keys = layout.count(r, i);
      if (r == 0) {
        CombineGradient(ex, samples, grads, num_unique, dim, sums);
      } else {
        AddGradient(ex, samples, grads, num_unique, dim, sums);
      }
      samples.inverse += samples.num_keys;
    }
    for (int64_t k = 0; scale_ != 1.0f && k < num_unique * dim; ++k) sums[k] *= scale_;
  }
};
REGISTER_KERNEL_BUILDER(Name("SokMergeGrads").Device(tensorflow::DEVICE_CPU), MergeGradsOp);

}  // namespace sok
