// The lookup of one process in device tables, and its gradient.
//
//     all tables     check, unique                               on the device
//     once           how many unique keys, or what is wrong      to the host: the op waits here
//     all tables     find or insert -> row numbers -> combine    on the device
//
// The host must know the number of unique keys, because it is a shape. The same copy says whether a
// batch is bad, so nothing of a bad batch has gone into any table.
#include <cstring>
#include <vector>

#include "cpp/core/cuda/lookup/check_batch.h"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/tf/cuda/batch.h"
#include "cpp/tf/cuda/kernel.h"
#include "cpp/tf/samples.h"

namespace sok {

namespace {

using cuda::CudaTable;

class DeviceLookupOp : public FeatureOp {
 public:
  explicit DeviceLookupOp(OpKernelConstruction* ctx) : FeatureOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("insert", &insert_));
  }

  void Compute(OpKernelContext* ctx) override {
    std::vector<DeviceTablePtr> tables;
    OP_REQUIRES_OK(ctx, LookupTables(ctx, "handles", &tables));
    FeatureInputs in;
    OpOutputList unique_keys, inverse;
    OP_REQUIRES_OK(ctx, in.Get(ctx));
    OP_REQUIRES_OK(ctx, GetLists(ctx, {}, {{"unique_keys", &unique_keys}, {"inverse", &inverse}}));
    const OpInputList& keys = in.keys;
    const int n = keys.size();
    OP_REQUIRES_OK(ctx, features_.CheckShapes(in));
    std::vector<Tensor> uniques(n);
    for (int i = 0; i < n; ++i) {
      Tensor* unused;
      OP_REQUIRES_OK(ctx, inverse.allocate(i, keys[i].shape(), &unused));
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(tensorflow::DT_INT64,
                                             TensorShape({keys[i].NumElements()}), &uniques[i]));
    }
    std::vector<uint32_t> num_unique(n);
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                     MakeUnique(workspace, stream, in, inverse, &uniques, num_unique.data());
                   }));
    std::vector<Samples> samples;
    std::vector<float*> out, key_rows;
    for (int i = 0; i < n; ++i) {
      uniques[i] = uniques[i].Slice(0, num_unique[i]);
      unique_keys.set(i, uniques[i]);
      samples.push_back(features_.MakeSamples(i, *inverse[i], in.row_splits[i], in.weights[i]));
    }
    OP_REQUIRES_OK(ctx, features_.MakeEmbeddings(ctx, samples, &out));
    OP_REQUIRES_OK(ctx, features_.MakeKeyRows(ctx, in, &key_rows));
    OP_REQUIRES_OK(ctx, WithTables(ctx, tables, [&](cuda::Stream stream) {
                     if (n > 0) Combine(stream, tables, uniques, samples, out, key_rows);
                   }));
  }

 private:
  // Throws if a batch is bad. num_unique [n] is on the host.
  void MakeUnique(cuda::Workspace& workspace, cuda::Stream stream, const FeatureInputs& in,
                  OpOutputList& inverse, std::vector<Tensor>* uniques, uint32_t* num_unique) const {
    const size_t n = in.keys.size();
    // What the host learns, in one piece for one copy: [n] findings, then [n] numbers. With the
    // slots behind them, one fill for all.
    size_t num_slots = 0;
    for (const Tensor& keys : in.keys) num_slots += cuda::NumSlots(keys.NumElements());
    auto* const findings = static_cast<cuda::BatchFinding*>(static_cast<void*>(
        workspace.Take<char>(n * (sizeof(cuda::BatchFinding) + 4) + num_slots * 4)));
    auto* const numbers = reinterpret_cast<uint32_t*>(findings + n);
    cuda::FillWithOnes(stream, findings, n * (sizeof(cuda::BatchFinding) + 4) + num_slots * 4);
    std::vector<cuda::BatchInput> inputs;
    std::vector<cuda::UniqueBatch> batches;
    for (size_t i = 0; i < n; ++i) {
      inputs.push_back(BatchInputOf(features_, i, in));
      batches.push_back({inputs[i].keys, inputs[i].num_keys, Keys(&(*uniques)[i]),
                         Places(inverse[i]), numbers + i});
    }
    cuda::CheckBatches(stream, inputs, findings);
    cuda::Unique(stream, workspace, batches, numbers + n);
    std::vector<char> learned(n * (sizeof(cuda::BatchFinding) + 4));
    cuda::CopyToHost(stream, learned.data(), findings, learned.size());
    for (size_t i = 0; i < n; ++i) {
      cuda::BatchFinding finding;
      std::memcpy(&finding, learned.data() + i * sizeof(finding), sizeof(finding));
      cuda::RefuseFound(stream, inputs[i], finding);
    }
    ObserveBatches(stream, inputs);
    std::memcpy(num_unique, learned.data() + n * sizeof(cuda::BatchFinding), n * 4);
  }

  // Under the tables' mutexes.
  void Combine(cuda::Stream stream, const std::vector<DeviceTablePtr>& tables,
               const std::vector<Tensor>& uniques, const std::vector<Samples>& samples,
               const std::vector<float*>& out, const std::vector<float*>& key_rows) const {
    cuda::Workspace& workspace = tables[0]->table().workspace();
    const cuda::Workspace::Scope scope(workspace, stream);
    std::vector<CudaTable::TableFind> finds;
    std::vector<CudaTable::TableKeys> inserts;
    std::vector<CudaTable::TableRows> gathers;
    std::vector<cuda::TableCombineBatch> of_tables;
    std::vector<cuda::CombineBatch> of_rows;
    const auto by_key = [&](size_t i) {
      Samples each;
      each.inverse = samples[i].inverse;
      each.num_keys = samples[i].num_keys;
      each.combiner = Combiner::kNone;
      return each;
    };
    const auto take_rows = [&](size_t i) {
      const int64_t dim = features_.dim(i);
      float* const rows = workspace.Take<float>(uniques[i].NumElements() * dim);
      of_rows.push_back({samples[i], rows, dim, out[i]});
      if (key_rows[i] != nullptr) of_rows.push_back({by_key(i), rows, dim, key_rows[i]});
      return rows;
    };
    // Rows of those that owe steps, and of keys that a filter refused, are made up first.
    std::vector<size_t> in_place;
    for (size_t i = 0; i < tables.size(); ++i) {
      CudaTable& table = tables[i]->table();
      const uint64_t* const keys = Keys(uniques[i]);
      const int64_t num_keys = uniques[i].NumElements();
      if (!insert_) {
        finds.push_back({&table, keys, num_keys, take_rows(i)});
        continue;
      }
      uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
      inserts.push_back({&table, keys, num_keys, row_numbers, nullptr, /*distinct=*/true});
      if (table.Ref().history.now == 0 && !table.filters()) {
        in_place.push_back(i);
      } else {
        gathers.push_back({&table, row_numbers, num_keys, take_rows(i)});
      }
    }
    CudaTable::FindOrInsertRows(stream, inserts);  // the last that may fail
    for (const size_t i : in_place) {              // by tables that have grown
      const cuda::TableRef table = inserts[i].table->Ref();
      of_tables.push_back({samples[i], table, inserts[i].row_numbers, out[i]});
      if (key_rows[i] == nullptr) continue;
      of_tables.push_back({by_key(i), table, inserts[i].row_numbers, key_rows[i]});
    }
    CudaTable::Find(stream, finds);
    CudaTable::GatherRows(stream, gathers);
    cuda::CombineRows(stream, of_tables);
    cuda::CombineRows(stream, of_rows);
  }

  bool insert_;
};

// Never waits.
class DeviceLookupGradOp : public FeatureOp {
 public:
  using FeatureOp::FeatureOp;

  void Compute(OpKernelContext* ctx) override {
    OpInputList grads, unique_keys;
    OpOutputList row_grads;
    std::vector<Samples> samples;
    OP_REQUIRES_OK(ctx, features_.GetGradients(ctx, &samples, &grads));
    OP_REQUIRES_OK(ctx,
                   GetLists(ctx, {{"unique_keys", &unique_keys}}, {{"row_grads", &row_grads}}));
    std::vector<cuda::CombineGradientBatch> batches;
    for (int i = 0; i < grads.size(); ++i) {
      const int64_t num_unique = unique_keys[i].NumElements(), dim = features_.dim(i);
      Tensor* out;
      OP_REQUIRES_OK(ctx, row_grads.allocate(i, TensorShape({num_unique, dim}), &out));
      batches.push_back(
          {samples[i], grads[i].flat<float>().data(), num_unique, dim, out->flat<float>().data()});
    }
    OP_REQUIRES_OK(ctx, WithWorkspace(ctx, [&](cuda::Workspace& workspace, cuda::Stream stream) {
                     // Every unique key has a position that reads it.
                     cuda::CombineGradient(stream, workspace, batches, /*all_occur=*/true);
                   }));
  }
};

}  // namespace

SOK_REGISTER_DEVICE_KERNEL(Name("SokLookup").HostMemory("handles"), DeviceLookupOp);
SOK_REGISTER_DEVICE_KERNEL(Name("SokLookupGrad"), DeviceLookupGradOp);

}  // namespace sok
