// Calls on many CudaTables at once, in shared launches (jobs.cuh). Tables with policies wait for
// the device anyway and are called one by one. Those without a hashtable wait once for all.
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

void CudaTable::Find(Stream stream, const std::vector<TableFind>& batches) {
  if (batches.empty()) return;
  Workspace& workspace = batches[0].table->impl_->workspace;
  const Workspace::Scope scope(workspace, stream);
  std::vector<FindBatch> finds;
  std::vector<Impl::DirectBatch> direct;
  std::vector<TableRows> gathers;
  for (const TableFind& batch : batches) {
    Impl& impl = *batch.table->impl_;
    CheckBatch(batch.num_keys, impl.options);
    impl.Use(stream);
    if (impl.is_direct()) {
      uint32_t* const row_numbers = workspace.Take<uint32_t>(batch.num_keys);
      direct.push_back({&impl, batch.keys, batch.num_keys, row_numbers});
      gathers.push_back({batch.table, row_numbers, batch.num_keys, batch.rows});
    } else {
      finds.push_back({impl.Ref(), batch.keys, batch.num_keys, batch.rows});
    }
  }
  Impl::FindDirectRows(stream, direct);
  GatherRows(stream, gathers);
  FindAndCopy(stream, finds);
}

void CudaTable::FindOrInsertRows(Stream stream, const std::vector<TableKeys>& batches) {
  std::vector<Impl::DirectBatch> direct;
  std::vector<TableKeys> now, later;
  for (const TableKeys& batch : batches) {
    Impl& impl = *batch.table->impl_;
    CheckBatch(batch.num_keys, impl.options);
    if (batch.num_keys == 0) continue;
    impl.Use(stream);
    if (impl.is_direct()) {
      direct.push_back(
          {&impl, batch.keys, Count(batch.num_keys, batch.num_actual), batch.row_numbers});
    } else {
      later.push_back(batch);
    }
  }
  Impl::FindDirectRows(stream, direct);  // refuses bad keys before any table inserts keys
  while (!later.empty()) {  // once more for tables that occur again: room is made per batch
    std::unordered_set<CudaTable*> tables;
    std::vector<InsertBatch> inserts;
    std::vector<Impl*> copying;
    now.swap(later);
    later.clear();
    const uint64_t round = StreamPoint::NextRound();
    // Tables near their capacity count missing keys first, all of them with one wait.
    std::unordered_map<CudaTable*, size_t> newcomer_of;  // its place in `newcomers` plus one
    std::vector<Impl::Newcomers> newcomers;
    for (const TableKeys& batch : now) {
      Impl& impl = *batch.table->impl_;
      if (impl.records != nullptr || !newcomer_of.emplace(batch.table, 0).second) continue;
      impl.PollCounters(round);
      if (!impl.MayFill(batch.num_keys)) continue;
      newcomers.push_back({&impl, batch.keys, Count(batch.num_keys, batch.num_actual)});
      newcomer_of[batch.table] = newcomers.size();
    }
    Impl::LearnMisses(stream, &newcomers);
    for (const TableKeys& batch : now) {
      Impl& impl = *batch.table->impl_;
      if (!tables.insert(batch.table).second) {
        later.push_back(batch);
      } else if (impl.records != nullptr) {
        batch.table->FindOrInsertRows(stream, batch.keys, batch.num_keys, batch.row_numbers,
                                      nullptr, batch.num_actual);
      } else {
        const size_t newcomer = newcomer_of[batch.table];
        inserts.push_back(impl.MakeInsert(
            batch.keys, batch.num_keys, batch.row_numbers, nullptr, batch.num_actual,
            newcomer > 0 ? newcomers[newcomer - 1].num_missing : -1, round));
        if (inserts.back().host_counters != nullptr) copying.push_back(&impl);
      }
    }
    InsertKeys(stream, inserts);
    Impl::CopiesAreUnderWay(copying);
  }
}

void CudaTable::FindOrInsert(Stream stream, const std::vector<TableFind>& batches) {
  if (batches.empty()) return;
  Workspace& workspace = batches[0].table->impl_->workspace;
  const Workspace::Scope scope(workspace, stream);
  std::vector<TableKeys> inserts;
  std::vector<TableRows> gathers;
  for (const TableFind& batch : batches) {
    const auto& [table, keys, num_keys, rows] = batch;
    if (table->keeps_records()) {
      table->RecordTrainingLookup(stream, keys, num_keys);
      Find(stream, {batch});
      continue;
    }
    CheckBatch(num_keys, table->options());
    uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
    inserts.push_back({table, keys, num_keys, row_numbers});
    gathers.push_back({table, row_numbers, num_keys, rows});
  }
  FindOrInsertRows(stream, inserts);
  GatherRows(stream, gathers);
}

void CudaTable::GatherRows(Stream stream, const std::vector<TableRows>& batches) {
  std::vector<CopyBatch> copies;
  for (const TableRows& batch : batches) {
    Impl& impl = *batch.table->impl_;
    impl.Use(stream);
    copies.push_back({impl.Ref(), batch.row_numbers, batch.num_rows, batch.rows});
  }
  CopyRows(stream, copies);
}

}  // namespace cuda
}  // namespace sok
