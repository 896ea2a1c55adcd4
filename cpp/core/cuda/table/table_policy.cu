// Admission: the calls of CudaTable that read and write its records.
//
//     keys -> unique -> find, ask the filter -> | had a row | admitted | refused |     one kernel
//       the host learns how many of each                                               the one wait
//       room in filter, index and arena; choose whom to evict if the table is full     may fail
//       evict, insert, write records, count                                            cannot fail
//
// Everything that can throw happens before the first count: a lookup that failed is not counted.
// A lookup of several tables prepares it in all of them before it changes the first (table_many.cu).
// Only row numbers depend on the order of threads.
#include <cuda_runtime.h>

#include <algorithm>
#include <new>

#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/policies/record_kernels.cuh"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {
namespace {

constexpr int64_t kPieceRecords = int64_t{1} << 20;  // moved to or from the host at a time: 32 MiB

}  // namespace

DeviceRecords& CudaTable::Impl::Records() const {
  RequireRecords(records != nullptr, options.name);
  return *records;
}

KeyBatch CudaTable::Impl::Classify(const uint64_t* keys, int64_t num_keys, bool distinct,
                                   int64_t step, const FilterRef& filter) {
  KeyBatch batch;
  batch.num_keys = num_keys;
  batch.new_rows = workspace.Take<uint32_t>(num_keys);
  batch.waiting_rows = workspace.Take<uint32_t>(num_keys);
  batch.classified.rows = workspace.Take<uint32_t>(num_keys);
  batch.classified.admitted = workspace.Take<uint64_t>(num_keys);
  batch.classified.frequencies = workspace.Take<int64_t>(num_keys);
  batch.classified.refused = workspace.Take<uint64_t>(num_keys);
  batch.classified.counts = workspace.Take<BatchCounts>(1);
  batch.unique = keys;
  if (!distinct) {
    uint64_t* const unique = workspace.Take<uint64_t>(num_keys);
    int32_t* const inverse = workspace.Take<int32_t>(num_keys);
    batch.num_unique = workspace.Take<uint32_t>(1);
    Unique(stream, workspace, {{keys, num_keys, unique, inverse, batch.num_unique}});
    batch.unique = unique;
    batch.inverse = inverse;
  }
  ClassifyKeys(stream, Ref(), records->data(), filter, batch.unique, batch.distinct(), step,
               batch.classified);
  CopyToHost(stream, &batch.counts, batch.classified.counts, sizeof(BatchCounts));
  return batch;
}

std::unique_ptr<CudaTable::Impl::TrainingLookup> CudaTable::Impl::PrepareTrainingLookup(
    const uint64_t* keys, int64_t num_keys, bool distinct) {
  std::unique_ptr<TrainingLookup> lookup(
      new TrainingLookup{this, {workspace, stream}, {}, records->step + 1, {}});
  lookup->batch = Classify(keys, num_keys, distinct, lookup->step, records->Filter());
  MakeRoomInFilter(lookup->batch);
  lookup->leaving = MakeRoomFor(lookup->batch);
  return lookup;
}

void CudaTable::Impl::MakeTrainingLookup(TrainingLookup* lookup) {
  DeviceRecords& rec = *records;
  const KeyBatch& batch = lookup->batch;
  const int64_t step = lookup->step;
  EvictRows(std::move(lookup->leaving));
  rec.step = step;
  rec.statistics.found += batch.counts.found;
  rec.statistics.admitted += batch.counts.admitted;
  rec.statistics.refused += batch.counts.counted;
  InsertAdmitted(batch, batch.classified.frequencies, step);
  CountRows(stream, rec.data(), batch.classified.rows, batch.distinct(), step);
  ForgetWaiting(batch.classified.admitted, batch.counts.admitted);
  const int64_t num_refused = batch.counts.refused;
  if (rec.is_bloom()) {
    CountInBloom(stream, rec.Filter(), batch.classified.refused, num_refused);
  } else if (num_refused > 0) {
    Impl& waiting = *rec.waiting->impl_;
    InsertKeys(stream,
               {{waiting.Ref(), batch.classified.refused, num_refused, batch.waiting_rows}});
    CountWaiting(stream, waiting.Ref(), batch.waiting_rows, num_refused, step);
    waiting.StartCopy();
    try {
      BoundWaiting();
    } catch (const std::bad_alloc&) {
      // The lookup has been counted already. The next one tries again.
    } catch (const DeviceMemoryError&) {
    }
  }
}

KeyBatch CudaTable::Impl::InsertWritten(const uint64_t* keys, int64_t num_keys) {
  DeviceRecords& rec = *records;
  const KeyBatch batch =
      Classify(keys, num_keys, false, rec.step, FilterRef());  // nothing is refused
  MakeRoomInFilter(batch);
  EvictRows(MakeRoomFor(batch, rec.options.evicts_by_score()));
  InsertAdmitted(batch, nullptr, rec.step);
  ForgetWaiting(batch.classified.admitted, batch.counts.admitted);
  rec.statistics.written += batch.counts.admitted;
  return batch;
}

const uint8_t* CudaTable::Impl::FirstPositions(const uint64_t* keys, int64_t num_keys, bool asked) {
  if (!asked) return nullptr;
  uint8_t* const first = workspace.Take<uint8_t>(num_keys);
  ChooseOccurrence(stream, workspace, keys, num_keys, Occurrence::kFirst, first);
  return first;
}

CudaTable::Impl::Leaving CudaTable::Impl::MakeRoomFor(const KeyBatch& batch, bool may_exceed) {
  const int64_t num_new = batch.counts.admitted;
  if (num_new == 0) return {};
  LearnCounters();
  int64_t excess = size.known() + num_new - options.max_capacity;
  const bool evicts = records->options.evicts_by_score() && excess > 0;
  if (evicts) {
    if (may_exceed) {
      // A table aside evicts all in the end: a later part may have lower scores.
      excess = is_aside ? 0 : std::min(excess, size.known() - batch.counts.present);
    } else {
      CheckBatchFits(num_new, batch.counts.present, options.max_capacity, options.name);
    }
    GrowFor(num_new, 0, std::max(most(), size.known() + num_new - excess));
    CountBatch(num_new);
  } else {
    MakeRoom(batch.classified.admitted, num_new, nullptr);
  }
  records->Reserve(stream, arena.num_chunks * chunk_rows());
  return evicts ? ChooseLowest(batch, excess) : Leaving();
}

void CudaTable::Impl::MakeRoomInFilter(const KeyBatch& batch) {
  if (records->waiting == nullptr) return;
  Impl& waiting = *records->waiting->impl_;
  if (batch.counts.refused > 0) {
    waiting.MakeRoom(batch.classified.refused, batch.counts.refused, nullptr);
  }
  if (batch.counts.admitted > 0) waiting.ReserveFreeRows();
}

void CudaTable::Impl::InsertAdmitted(const KeyBatch& batch, const int64_t* frequencies,
                                     int64_t step) {
  const int64_t num_new = batch.counts.admitted;
  if (num_new == 0) return;
  InsertKeys(stream, {{Ref(), batch.classified.admitted, num_new, batch.new_rows}});
  AddRecords(stream, records->data(), batch.classified.admitted, batch.new_rows, frequencies,
             num_new, step);
  StartCopy();
}

// Does not wait for the number of keys that waited: a copy after the erasure updates the bounds.
void CudaTable::Impl::ForgetWaiting(const uint64_t* keys, int64_t num_keys) {
  if (records->waiting == nullptr || num_keys == 0) return;
  Impl& waiting = *records->waiting->impl_;
  EraseKeys(stream, waiting.Ref(), keys, num_keys);
  waiting.StartCopy();
}

// On the host: the filter is rarely full, since each time an eighth of it goes.
void CudaTable::Impl::BoundWaiting() {
  DeviceRecords& rec = *records;
  if (!rec.options.bounds_waiting()) return;
  CudaTable& waiting = *rec.waiting;
  if (waiting.impl_->size.bound() <= rec.options.max_waiting) return;
  if (waiting.Size(stream) <= rec.options.max_waiting) return;
  std::vector<WaitingKey> keys = rec.ExportWaiting(stream);
  const int64_t count = PutForgottenFirst(rec.options.max_waiting, &keys);
  std::vector<uint64_t> oldest;
  oldest.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) oldest.push_back(keys[i].key);
  Buffer device_keys(oldest.size() * sizeof(uint64_t), stream);
  CopyToDevice(stream, device_keys.data(), oldest.data(), device_keys.bytes());
  waiting.Erase(stream, device_keys.as<uint64_t>(), count);
  rec.statistics.forgotten += count;
}

// ---- snapshots ----

void CudaTable::Impl::ReadRecords(const uint32_t* rows, int64_t num_keys, int64_t* out) {
  const int64_t piece_size = std::min(num_keys, kPieceRecords);
  const HostBuffer host(static_cast<size_t>(piece_size) * sizeof(DeviceRecord));
  const Buffer piece(host.bytes(), stream);
  for (int64_t first = 0; first < num_keys; first += kPieceRecords) {
    const int64_t n = std::min(num_keys - first, kPieceRecords);
    GatherRecords(stream, records->data(), rows + first, n, piece.as<DeviceRecord>());
    auto* const pinned = host.as<DeviceRecord>();
    CopyToHost(stream, pinned, piece.data(), static_cast<size_t>(n) * sizeof(DeviceRecord));
    for (int64_t i = 0; i < n; ++i) {
      const DeviceRecord& record = pinned[i];
      *out++ = record.frequency;
      *out++ = record.last_step;
      *out++ = records->has_scores() ? record.score : 0;
    }
  }
}

void CudaTable::Impl::ExportCounters(RecordSnapshot* snapshot) {
  snapshot->waiting = records->ExportWaiting(stream);
  snapshot->counters = records->ExportCounters(stream);
  snapshot->step = records->step;
}

void CudaTable::Impl::ImportRecords(const RecordSnapshot& snapshot, const uint64_t* keys,
                                    const uint32_t* rows, int64_t num_keys) {
  DeviceRecords& rec = *records;
  if (snapshot.step >= 0) rec.step = snapshot.step;
  if (rec.is_bloom() && !snapshot.counters.empty()) {
    rec.ImportCounters(stream, snapshot.counters);
  }
  rec.ImportWaiting(stream, snapshot.waiting);
  if (snapshot.records.empty()) return;
  const int64_t piece_size = std::min(num_keys, kPieceRecords);
  const Buffer piece(static_cast<size_t>(3 * piece_size) * sizeof(int64_t), stream);
  for (int64_t first = 0; first < num_keys; first += kPieceRecords) {
    const int64_t n = std::min(num_keys - first, kPieceRecords);
    CopyToDevice(stream, piece.data(), snapshot.records.data() + 3 * first,
                 static_cast<size_t>(3 * n) * sizeof(int64_t));
    WriteRecords(stream, rec.data(), keys + first, rows + first, piece.as<int64_t>(),
                 rec.has_scores(), n);
  }
}

// ---- calls ----

void CudaTable::RecordTrainingLookup(CallContext context, const uint64_t* keys, int64_t num_keys) {
  Impl& impl = *impl_;
  impl.Records();
  CheckBatch(num_keys, impl.options);
  const auto lock = impl.Enter(context.stream());
  impl.MakeTrainingLookup(impl.PrepareTrainingLookup(keys, num_keys).get());
}

PolicyCounts CudaTable::Statistics(CallContext context) const {
  const DeviceRecords& rec = impl_->Records();
  const Stream stream = context.stream();
  const auto lock = impl_->Enter(stream);
  PolicyCounts statistics = rec.statistics;
  statistics.size = Size(stream);
  statistics.seen = statistics.found + statistics.admitted + statistics.refused;
  statistics.buffered = rec.buffer.size();
  statistics.waiting = rec.waiting == nullptr ? 0 : rec.waiting->Size(stream);
  unsigned long long dropped = 0;
  CopyToHost(stream, &dropped, rec.dropped_gradients.data(), sizeof(dropped));
  statistics.dropped_gradients = static_cast<int64_t>(dropped);
  statistics.step = rec.step;
  return statistics;
}

void CudaTable::KeyStatistics(CallContext context, const uint64_t* keys, int64_t num_keys,
                              uint8_t* present, int64_t* frequencies, int64_t* last_steps) const {
  const DeviceRecords& rec = impl_->Records();
  CheckBatch(num_keys, impl_->options);
  const auto lock = impl_->Enter(context.stream());
  ReadSeen(impl_->stream, impl_->Ref(), rec.data(), rec.Filter(), keys, num_keys, present,
           frequencies, last_steps);
}

int64_t CudaTable::AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                                const int64_t* scores) {
  Impl& impl = *impl_;
  RequireCustomScore(impl.Records().options.score, impl.options.name);
  CheckBatch(num_keys, impl.options);
  const Stream stream = context.stream();
  const auto lock = impl.Enter(stream);
  const Workspace::Scope scope(impl.workspace, stream);
  uint32_t* const rows = impl.workspace.Take<uint32_t>(num_keys);
  uint8_t* const last = impl.workspace.Take<uint8_t>(num_keys);
  uint32_t* const num_present = impl.workspace.Take<uint32_t>(1);
  FillWithZeros(stream, num_present, sizeof(uint32_t));
  FindKeys(stream, {{impl.Ref(), keys, num_keys, rows}});
  ChooseOccurrence(stream, impl.workspace, keys, num_keys, Occurrence::kLast, last);
  WriteScores(stream, impl.records->data(), rows, last, scores, num_keys, num_present);
  uint32_t assigned = 0;
  CopyToHost(stream, &assigned, num_present, sizeof(assigned));
  return assigned;
}

void CudaTable::SetStep(int64_t step) {
  DeviceRecords& rec = impl_->Records();
  CheckTableStep(step, impl_->options.name);
  const std::lock_guard<HeldMutex> lock(impl_->mutex);
  rec.step = step;
}

void CudaTable::CountDroppedGradients(Stream stream, const uint32_t* row_numbers, int64_t num_rows,
                                      const uint32_t* num_actual) {
  DeviceRecords& rec = impl_->Records();
  impl_->Use(stream);
  CountNoRow(stream, row_numbers, Count(num_rows, num_actual),
             rec.dropped_gradients.as<unsigned long long>());
}

}  // namespace cuda
}  // namespace sok
