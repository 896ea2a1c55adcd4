// Calls on many CudaTables at once, in shared launches (jobs.cuh). Tables with policies prepare and
// make their lookups one by one: each waits for the device. Those without a hashtable wait once for
// all.
#include <memory>
#include <unordered_map>
#include <vector>

#include "cpp/core/cuda/lookup/segments.h"
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

namespace {

// One batch per table with a hashtable. If such a table occurs several times, its batches are put
// into `again` as they were, and their keys come together in the order of the batches.
std::vector<CudaTable::TableKeys> OncePerTable(Stream stream, Workspace& workspace,
                                               const std::vector<CudaTable::TableKeys>& batches,
                                               std::vector<CudaTable::TableKeys>* again) {
  std::unordered_map<CudaTable*, int64_t> times;
  for (const CudaTable::TableKeys& batch : batches) ++times[batch.table];
  if (times.size() == batches.size()) return batches;
  std::vector<CudaTable::TableKeys> once;
  SegmentList list;
  for (const CudaTable::TableKeys& batch : batches) {
    CudaTable* const table = batch.table;
    int64_t& number = times[table];
    if (number == 1 || !table->options().use_hashtable) once.push_back(batch);
    if (number < 2 || !table->options().use_hashtable) continue;
    number = 0;  // its later batches come with this one
    const size_t first = again->size();
    int64_t num_keys = 0;
    for (CudaTable::TableKeys part : batches) {
      if (part.table != table) continue;
      part.num_keys = OnHost(stream, {part.num_keys, part.num_actual});
      part.num_actual = nullptr;
      again->push_back(part);
      num_keys += part.num_keys;
    }
    uint64_t* to = workspace.Take<uint64_t>(num_keys);
    once.push_back({table, to, num_keys, workspace.Take<uint32_t>(num_keys)});
    for (size_t b = first; b < again->size(); to += (*again)[b++].num_keys) {
      list.Move((*again)[b].keys, to, (*again)[b].num_keys);
    }
  }
  list.Run(stream, workspace);
  return once;
}

}  // namespace

void CudaTable::FindOrInsertRows(Stream stream, const std::vector<TableKeys>& batches) {
  if (batches.empty()) return;
  Workspace& workspace = batches[0].table->impl_->workspace;
  const Workspace::Scope scope(workspace, stream);
  std::vector<TableKeys> recorded, plain, found_later;
  std::vector<Impl::DirectBatch> direct;
  std::vector<Impl::Newcomers> newcomers;  // tables near their capacity count missing keys first
  const uint64_t round = StreamPoint::NextRound();
  for (const TableKeys& batch : OncePerTable(stream, workspace, batches, &found_later)) {
    Impl& impl = *batch.table->impl_;
    CheckBatch(batch.num_keys, impl.options);
    impl.Use(stream);
    const Count num_keys(batch.num_keys, batch.num_actual);
    if (impl.records != nullptr) {  // counts a lookup without keys, too
      recorded.push_back(batch);
    } else if (batch.num_keys == 0) {
      continue;
    } else if (impl.is_direct()) {
      direct.push_back({&impl, batch.keys, num_keys, batch.row_numbers});
    } else {
      plain.push_back(batch);
      impl.PollCounters(round);
      if (impl.MayFill(batch.num_keys)) newcomers.push_back({&impl, batch.keys, num_keys});
    }
  }
  Impl::FindDirectRows(stream, direct);
  Impl::LearnMisses(stream, &newcomers);
  std::vector<std::unique_ptr<Impl::TrainingLookup>> lookups;
  for (const TableKeys& batch : recorded) {
    lookups.push_back(batch.table->impl_->PrepareTrainingLookup(
        batch.keys, OnHost(stream, {batch.num_keys, batch.num_actual}), batch.distinct));
  }
  std::vector<InsertBatch> inserts;
  std::vector<Impl*> copying;
  auto newcomer = newcomers.begin();
  for (const TableKeys& batch : plain) {
    Impl& impl = *batch.table->impl_;
    const bool is_newcomer = newcomer != newcomers.end() && newcomer->impl == &impl;
    const int64_t num_missing = is_newcomer ? newcomer++->num_missing : -1;
    inserts.push_back(impl.MakeInsert(batch.keys, batch.num_keys, batch.row_numbers, nullptr,
                                      batch.num_actual, num_missing, round));
    if (inserts.back().host_counters != nullptr) copying.push_back(&impl);
  }
  found_later.insert(found_later.end(), recorded.begin(), recorded.end());

  // From here on nothing fails.
  for (const auto& lookup : lookups) lookup->table->MakeTrainingLookup(lookup.get());
  InsertKeys(stream, inserts);
  Impl::CopiesAreUnderWay(copying);
  std::vector<FindKeysBatch> finds;
  for (const TableKeys& batch : found_later) {
    finds.push_back({batch.table->impl_->Ref(),
                     batch.keys,
                     {batch.num_keys, batch.num_actual},
                     batch.row_numbers});
  }
  FindKeys(stream, finds);
}

void CudaTable::FindOrInsert(Stream stream, const std::vector<TableFind>& batches) {
  if (batches.empty()) return;
  Workspace& workspace = batches[0].table->impl_->workspace;
  const Workspace::Scope scope(workspace, stream);
  std::vector<TableKeys> inserts;
  std::vector<TableRows> gathers;
  for (const auto& [table, keys, num_keys, rows] : batches) {
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
