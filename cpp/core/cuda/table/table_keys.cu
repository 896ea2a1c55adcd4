// Keys of a CudaTable: lookup, insertion, erasure.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

void CheckBatch(int64_t num_keys, const TableOptions& options) {
  if (num_keys >= 0 && num_keys < int64_t{1} << 30) return;
  throw std::invalid_argument("A batch must have between 0 and 2^30 - 1 keys. Received: " +
                              std::to_string(num_keys) + " (table '" + options.name + "')");
}

void CudaTable::Find(CallContext context, const uint64_t* keys, int64_t num_keys, float* rows,
                     uint8_t* found) const {
  CheckBatch(num_keys, impl_->options);
  const Stream stream = context.stream();
  const auto lock = impl_->Enter(stream);
  if (impl_->is_direct()) return impl_->FindDirect(keys, num_keys, rows, found);
  FindAndCopy(stream, {{impl_->Ref(), keys, num_keys, rows, found}});
}

void CudaTable::WriteZeros(CallContext context, float* rows, int64_t num_rows) const {
  FillWithZeros(context.stream(), rows, static_cast<size_t>(num_rows * dim()) * sizeof(float));
}

void CudaTable::FindRows(Stream stream, const uint64_t* keys, int64_t num_keys,
                         uint32_t* row_numbers) {
  CheckBatch(num_keys, impl_->options);
  impl_->Use(stream);
  if (impl_->is_direct())
    return impl_->FindDirectRows(stream, {{impl_.get(), keys, num_keys, row_numbers}});
  FindKeys(stream, {{impl_->Ref(), keys, num_keys, row_numbers}});
}

void CudaTable::FindOrInsertRows(Stream stream, const uint64_t* keys, int64_t num_keys,
                                 uint32_t* row_numbers, uint8_t* inserted,
                                 const uint32_t* num_actual) {
  CheckBatch(num_keys, impl_->options);
  if (num_keys == 0) return;
  Impl& impl = *impl_;
  impl.Use(stream);
  if (impl.is_direct()) {  // no key is new to it
    impl.FindDirectRows(stream, {{&impl, keys, Count(num_keys, num_actual), row_numbers}});
    if (inserted != nullptr) FillWithZeros(stream, inserted, static_cast<size_t>(num_keys));
    return;
  }
  if (impl.records != nullptr) {
    num_keys = OnHost(stream, {num_keys, num_actual});
    const Workspace::Scope scope(impl.workspace, stream);
    const uint8_t* const first = impl.FirstPositions(keys, num_keys, inserted != nullptr);
    const KeyBatch batch = impl.InsertWritten(keys, num_keys);
    FindKeys(stream, {{impl.Ref(), keys, num_keys, row_numbers}});
    if (inserted != nullptr) FlagInserted(stream, batch, row_numbers, first, inserted);
    return;
  }
  const InsertBatch batch = impl.MakeInsert(keys, num_keys, row_numbers, inserted, num_actual);
  InsertKeys(stream, {batch});
  if (batch.host_counters != nullptr) Impl::CopiesAreUnderWay({&impl});
}

void CudaTable::FindOrInsert(CallContext context, const uint64_t* keys, int64_t num_keys,
                             float* rows, uint8_t* inserted) {
  const Stream stream = context.stream();
  const auto lock = impl_->Enter(stream);
  const Workspace::Scope scope(impl_->workspace, stream);
  uint32_t* const row_numbers = impl_->workspace.Take<uint32_t>(num_keys);
  if (impl_->records != nullptr) {
    CheckBatch(num_keys, impl_->options);
    const uint8_t* const first = impl_->FirstPositions(keys, num_keys, inserted != nullptr);
    const auto lookup = impl_->PrepareTrainingLookup(keys, num_keys);
    impl_->MakeTrainingLookup(lookup.get());
    FindKeys(stream, {{impl_->Ref(), keys, num_keys, row_numbers}});
    if (inserted != nullptr) FlagInserted(stream, lookup->batch, row_numbers, first, inserted);
    return GatherRows(stream, row_numbers, num_keys, rows);
  }
  FindOrInsertRows(stream, keys, num_keys, row_numbers, inserted);
  GatherRows(stream, row_numbers, num_keys, rows);
}

void CudaTable::GatherRows(Stream stream, const uint32_t* row_numbers, int64_t num_rows,
                           float* rows) {
  impl_->Use(stream);
  CopyRows(stream, {{impl_->Ref(), row_numbers, num_rows, rows}});
}

void CudaTable::Assign(CallContext context, const uint64_t* keys, int64_t num_keys,
                       const float* rows) {
  Impl& impl = *impl_;
  const Stream stream = context.stream();
  const auto lock = impl.Enter(stream);
  const Workspace::Scope scope(impl.workspace, stream);
  uint32_t* const row_numbers = impl.workspace.Take<uint32_t>(num_keys);
  uint8_t* const last = impl.workspace.Take<uint8_t>(num_keys);
  FindOrInsertRows(stream, keys, num_keys, row_numbers, nullptr);
  ChooseOccurrence(stream, impl.workspace, keys, num_keys, Occurrence::kLast, last);
  if (impl.history != nullptr && impl.history->pending()) {
    // Steps that are owed so far must not change the given row later.
    CatchUpRows(stream, impl.Ref(), row_numbers, last, num_keys);
  }
  WriteRows(stream, impl.Ref(), row_numbers, last, num_keys, dim(), rows);
  if (impl.options.policy.evicts_by_score()) surplus_ += impl.EvictSurplus();
}

int64_t CudaTable::Erase(CallContext context, const uint64_t* keys, int64_t num_keys) {
  CheckBatch(num_keys, impl_->options);
  RequireHashtable(impl_->options);
  if (num_keys == 0) return 0;
  Impl& impl = *impl_;
  const Stream stream = context.stream();
  const auto lock = impl.Enter(stream);
  if (impl.records != nullptr) impl.ForgetBuffered(keys, num_keys);
  impl.LearnCounters();
  impl.ReserveFreeRows();
  const Workspace::Scope scope(impl.workspace, stream);
  uint32_t* row_numbers = nullptr;
  if (impl.records != nullptr) {
    row_numbers = impl.workspace.Take<uint32_t>(num_keys);
    FindKeys(stream, {{impl.Ref(), keys, num_keys, row_numbers}});
  }
  EraseKeys(stream, impl.Ref(), keys, num_keys);
  impl.StartCopy();
  impl.WaitForCopy();
  const int64_t num_erased = impl.host_counters->erased;
  if (impl.records != nullptr) {
    RemoveRecords(stream, impl.records->data(), row_numbers, num_keys);
    impl.records->statistics.erased += num_erased;
    CudaTable* const waiting = impl.records->waiting.get();
    if (waiting != nullptr) return num_erased + waiting->Erase(stream, keys, num_keys);
  }
  return num_erased;
}

}  // namespace cuda
}  // namespace sok
