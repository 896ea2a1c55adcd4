// Eviction: which keys lose their row, and what happens to it.
//
//     full: lowest scores (ChooseLowest)  |  PrepareEviction: a copy of the last rows for the
//     on request (Evict)                  |    buffer in host memory                  may fail
//     written beyond max_capacity         |  EvictRows: keys out of the index,
//       (EvictSurplus)                    |    row numbers free for new keys       cannot fail
//
// A row is brought up to date before it goes to the buffer. The next key with its row number starts
// from an initial row and initial slot rows, like any new key. Rows are sorted only if the buffer
// shows their order.
#include <cuda_runtime.h>

#include <algorithm>
#include <list>
#include <new>
#include <vector>

#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/policies/record_kernels.cuh"
#include "cpp/core/cuda/policies/select_lowest.cuh"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

// The counters must be known exactly.
CudaTable::Impl::Leaving CudaTable::Impl::ChooseLowest(const KeyBatch& batch, int64_t count) {
  DeviceRecords& rec = *records;
  const Workspace::Scope scope(workspace, stream);
  uint32_t* const lowest = workspace.Take<uint32_t>(count);
  const int64_t num_words = rows.known() / 32 + 1;
  uint32_t* const kept = workspace.Take<uint32_t>(num_words);
  FillWithZeros(stream, kept, static_cast<size_t>(num_words) * sizeof(uint32_t));
  MarkRows(stream, batch.classified.rows, batch.distinct(), kept);
  SelectLowest(stream, workspace, rec.data(), rec.options.score, rows.known(), kept, count,
               rec.options.evicted_buffer > 0, &rec.hint, lowest);
  return PrepareEviction(lowest, count);
}

// The counters must be known exactly.
CudaTable::Impl::Leaving CudaTable::Impl::PrepareEviction(const uint32_t* going, int64_t count) {
  DeviceRecords& rec = *records;
  if (count == 0) return {};
  Leaving leaving{going, count, workspace.Take<uint64_t>(count), {}};
  ReserveFreeRows();
  const int64_t keep = std::min(rec.options.evicted_buffer, count);
  rec.buffer.SetSlots(slots);
  leaving.buffered = rec.buffer.MakeRows(keep, options.dim);
  auto next = leaving.buffered.begin();
  if (keep > 0) {
    const uint32_t* const last = going + (count - keep);
    if (history != nullptr && history->pending()) {
      CatchUpRows(stream, Ref(), last, nullptr, keep);  // buffered rows owe nothing
    }
    const TableRef ref = Ref();
    const int64_t piece_size = std::min(keep, std::max<int64_t>(1, kPieceFloats / ref.row_floats));
    const Buffer rows_piece(static_cast<size_t>(piece_size * ref.row_floats) * sizeof(float),
                            stream);
    const Buffer records_piece(static_cast<size_t>(piece_size) * sizeof(DeviceRecord), stream);
    std::vector<float> host_rows(static_cast<size_t>(piece_size * ref.row_floats));
    std::vector<DeviceRecord> host_records(static_cast<size_t>(piece_size));
    for (int64_t first = 0; first < keep; first += piece_size) {
      const int64_t n = std::min(piece_size, keep - first);
      CopyWholeRows(stream, ref, last + first, n, rows_piece.as<float>());
      GatherRecords(stream, rec.data(), last + first, n, records_piece.as<DeviceRecord>());
      CopyToHost(stream, host_rows.data(), rows_piece.data(),
                 static_cast<size_t>(n * ref.row_floats) * sizeof(float));
      CopyToHost(stream, host_records.data(), records_piece.data(),
                 static_cast<size_t>(n) * sizeof(DeviceRecord));
      for (int64_t i = 0; i < n; ++i) {
        EvictedRow& to = *next++;
        const DeviceRecord& record = host_records[i];
        const float* const row = host_rows.data() + i * ref.row_floats;
        to.record = {record.key, record.frequency, record.last_step};
        std::copy_n(row, options.dim, to.row.data());
        CopySavedSlots(slots, row + options.dim, to.slot_row.data());
      }
    }
  }
  return leaving;
}

int64_t CudaTable::Impl::EvictSurplus() {
  LearnCounters();
  const int64_t surplus = size.known() - options.max_capacity;
  if (surplus <= 0) return 0;
  const Workspace::Scope scope(workspace, stream);
  try {
    EvictRows(ChooseLowest(KeyBatch(), surplus));
  } catch (const std::bad_alloc&) {
    if (is_aside) throw;
    // The keys have been written already. The next new key evicts the surplus, too.
  } catch (const DeviceMemoryError&) {
    if (is_aside) throw;
  }
  return surplus;
}

void CudaTable::Impl::EvictRows(Leaving leaving) {
  DeviceRecords& rec = *records;
  const int64_t count = leaving.count;
  if (count == 0) return;
  GatherKeys(stream, rec.data(), leaving.rows, count, leaving.keys);
  EraseKeys(stream, Ref(), leaving.keys, count);
  RemoveRecords(stream, rec.data(), leaving.rows, count);
  size.Remove(count);
  rec.statistics.evicted += count;
  rec.statistics.dropped += count - static_cast<int64_t>(leaving.buffered.size());
  rec.statistics.dropped +=
      rec.buffer.Append(std::move(leaving.buffered), rec.options.evicted_buffer);
}

int64_t CudaTable::Impl::Evict() {
  DeviceRecords& rec = *records;
  const PolicyOptions& policy = rec.options;
  LearnCounters();
  if (policy.l2_threshold >= 0.0f) CatchUpAll();
  const Workspace::Scope scope(workspace, stream);
  const int64_t num_rows = rows.known();
  uint32_t* const going = workspace.Take<uint32_t>(num_rows);
  uint32_t* const scratch = workspace.Take<uint32_t>(num_rows);
  uint32_t* const counts = workspace.Take<uint32_t>(2);
  FillWithZeros(stream, counts, 2 * sizeof(uint32_t));
  ListEvictable(stream, Ref(), rec.data(), num_rows, rec.step, policy.steps_to_live,
                policy.l2_threshold, going, counts, scratch, counts + 1);
  uint32_t count = 0;
  CopyToHost(stream, &count, counts, sizeof(count));
  uint32_t* in_order = going;
  if (policy.evicted_buffer > 0 && count > 1) {
    uint64_t* const keys = workspace.Take<uint64_t>(count);
    uint64_t* const sorted_keys = workspace.Take<uint64_t>(count);
    in_order = scratch;
    GatherKeys(stream, rec.data(), going, count, keys);
    SortPairs(stream, workspace, keys, sorted_keys, going, in_order, count, 64);
  }
  EvictRows(PrepareEviction(in_order, count));
  if (rec.waiting != nullptr && policy.steps_to_live > 0) ExpireWaiting();
  return count;
}

void CudaTable::Impl::ExpireWaiting() {
  DeviceRecords& rec = *records;
  CudaTable& waiting = *rec.waiting;
  const int64_t num_keys = waiting.Size(stream);
  if (num_keys == 0) return;
  const Workspace::Scope scope(workspace, stream);
  uint64_t* const keys = workspace.Take<uint64_t>(num_keys);
  uint32_t* const key_rows = workspace.Take<uint32_t>(num_keys);
  uint64_t* const outlived = workspace.Take<uint64_t>(num_keys);
  uint32_t* const counts = workspace.Take<uint32_t>(2);
  FillWithZeros(stream, counts, 2 * sizeof(uint32_t));
  ListKeys(stream, waiting.Ref().index, keys, key_rows, counts);
  ListOutlivedWaiting(stream, waiting.Ref(), keys, key_rows, num_keys, rec.step,
                      rec.options.steps_to_live, outlived, counts + 1);
  uint32_t num_outlived = 0;
  CopyToHost(stream, &num_outlived, counts + 1, sizeof(num_outlived));
  waiting.Erase(stream, outlived, num_outlived);
}

void CudaTable::Impl::ForgetBuffered(const uint64_t* keys, int64_t num_keys) {
  DeviceRecords& rec = *records;
  if (rec.buffer.size() == 0) return;
  std::vector<uint64_t> on_host(static_cast<size_t>(num_keys));
  CopyToHost(stream, on_host.data(), keys, on_host.size() * sizeof(uint64_t));
  rec.statistics.dropped += rec.buffer.Forget(on_host.data(), num_keys);
}

int64_t CudaTable::Evict(CallContext context) {
  impl_->Records();
  const auto lock = impl_->Enter(context.stream());
  return impl_->Evict();
}

EvictedRows CudaTable::PopEvicted() {
  const std::lock_guard<HeldMutex> lock(impl_->mutex);
  DeviceRecords& rec = impl_->Records();
  rec.buffer.SetSlots(impl_->slots);
  EvictedRows popped = rec.buffer.Pop();
  rec.statistics.popped += static_cast<int64_t>(popped.keys.size());
  return popped;
}

}  // namespace cuda
}  // namespace sok
