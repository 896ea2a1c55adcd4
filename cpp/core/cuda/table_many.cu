// Calls on many CudaTables at once, in the launches of one (jobs.cuh). Tables with policies and
// those without a hashtable wait for the device anyway, and are called one by one.
#include <unordered_set>
#include <vector>

#include "cpp/core/cuda/index.cuh"
#include "cpp/core/cuda/rows_ops.cuh"
#include "cpp/core/cuda/table.h"
#include "cpp/core/cuda/table_impl.h"

namespace sok {
namespace cuda {

void CudaTable::Find(Stream stream, const std::vector<TableFind>& batches) {
  std::vector<FindBatch> finds;
  for (const TableFind& batch : batches) {
    Impl& impl = *batch.table->impl_;
    CheckBatch(batch.num_keys, impl.options);
    impl.Use(stream);
    if (impl.is_direct()) {
      impl.FindDirect(batch.keys, batch.num_keys, batch.rows, nullptr);
      continue;
    }
    finds.push_back({impl.Ref(), batch.keys, batch.num_keys, batch.rows});
  }
  FindAndCopy(stream, finds);
}

void CudaTable::FindOrInsertRows(Stream stream, const std::vector<TableKeys>& batches) {
  std::vector<TableKeys> now, later = batches;
  while (!later.empty()) {  // once more for tables that occur again: room is made for a batch
    std::unordered_set<CudaTable*> tables;
    std::vector<InsertBatch> inserts;
    std::vector<Impl*> copying;
    now.swap(later);
    later.clear();
    for (const TableKeys& batch : now) {
      Impl& impl = *batch.table->impl_;
      CheckBatch(batch.num_keys, impl.options);
      if (batch.num_keys == 0) continue;
      if (!tables.insert(batch.table).second) {
        later.push_back(batch);
      } else if (impl.records != nullptr || impl.is_direct()) {
        batch.table->FindOrInsertRows(stream, batch.keys, batch.num_keys, batch.row_numbers,
                                      nullptr, batch.num_actual);
      } else {
        impl.Use(stream);
        inserts.push_back(impl.MakeInsert(batch.keys, batch.num_keys, batch.row_numbers, nullptr,
                                          batch.num_actual));
        if (inserts.back().host_counters != nullptr) copying.push_back(&impl);
      }
    }
    InsertKeys(stream, inserts);
    for (Impl* impl : copying) impl->CopyIsUnderWay();
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
      table->FindOrInsert(stream, keys, num_keys, rows, nullptr);
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
