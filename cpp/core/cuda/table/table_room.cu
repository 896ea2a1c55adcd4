// Room in a CudaTable: what the host knows of its size, and memory for a batch before its kernels.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {
namespace {

constexpr int64_t kMaxRows = 0xFFFFFFFE;  // a row number plus one must not be kNoRow

}  // namespace

int64_t OnHost(Stream stream, const Count& count) {
  if (count.actual == nullptr) return count.most;
  uint32_t actual = 0;
  CopyToHost(stream, &actual, count.actual, sizeof(actual));
  return std::min<int64_t>(count.most, actual);
}

// ---- what the host knows of the counters ----

void CudaTable::Impl::StartCopy() {
  CudaCheck(cudaMemcpyAsync(host_counters, counters.data(), sizeof(Counters),
                            cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
  CopiesAreUnderWay({this});
}

void CudaTable::Impl::CopiesAreUnderWay(const std::vector<Impl*>& tables) {
  if (tables.empty()) return;
  const std::shared_ptr<StreamPoint>& point = tables[0]->own_point;
  point->Record(tables[0]->stream);
  for (Impl* impl : tables) {
    impl->copy_point = point;
    for (SizeBound* bound : {&impl->used, &impl->rows, &impl->size}) bound->CopyStarted();
  }
}

void CudaTable::Impl::TakeCounters() {
  used.CopyArrived(host_counters->used);
  rows.CopyArrived(host_counters->next_row);
  size.CopyArrived(host_counters->size);
}

void CudaTable::Impl::PollCounters(uint64_t round) {
  if (size.copy_under_way() && copy_point->HasPassed(round)) TakeCounters();
}

void CudaTable::Impl::WaitForCopy() {
  if (!size.copy_under_way()) return;
  copy_point->Wait();
  TakeCounters();
}

void CudaTable::Impl::LearnCounters() {
  WaitForCopy();
  if (size.exact()) return;
  StartCopy();
  WaitForCopy();
}

void CudaTable::Impl::CountBatch(int64_t num_keys) {
  for (SizeBound* bound : {&used, &rows, &size}) bound->Add(num_keys);
}

// ---- room ----

int64_t CudaTable::Impl::most() const {
  return options.max_capacity > 0 ? std::min(options.max_capacity, kMaxRows) : kMaxRows;
}

int64_t CudaTable::Impl::MaxUsed(int64_t buckets_count) const {
  const int64_t slots_count = buckets_count * kBucketSlots;
  // One slot stays empty whatever the load factor: a probe ends there.
  return std::min(slots_count - 1, static_cast<int64_t>(slots_count * max_load_factor));
}

bool CudaTable::Impl::HasRoom(int64_t num_keys) const {
  const int64_t rows_needed = std::min(rows.bound() + num_keys, most());
  return size.bound() + num_keys <= most() && used.bound() + num_keys <= MaxUsed(num_buckets) &&
         rows_needed <= arena.num_chunks * chunk_rows();
}

void CudaTable::Impl::LearnMisses(Stream stream, std::vector<Newcomers>* batches) {
  if (batches->empty()) return;
  Workspace& workspace = batches->front().impl->workspace;
  const Workspace::Scope scope(workspace, stream);
  Misses* const misses = workspace.Take<Misses>(static_cast<int64_t>(batches->size()));
  std::vector<MissBatch> counts;
  for (const Newcomers& batch : *batches) {
    counts.push_back({batch.impl->Ref(), batch.keys, batch.num_keys});
  }
  CountMisses(stream, counts, misses);
  std::vector<Misses> found(batches->size());
  CopyToHost(stream, found.data(), misses, found.size() * sizeof(Misses));
  for (size_t b = 0; b < found.size(); ++b) {
    Newcomers& batch = (*batches)[b];
    batch.num_missing = found[b].num_missing;
    // A copy that was under way has arrived: it started before this one.
    if (batch.impl->size.copy_under_way()) batch.impl->TakeCounters();
    batch.impl->used.Set(found[b].counters.used);
    batch.impl->rows.Set(found[b].counters.next_row);
    batch.impl->size.Set(found[b].counters.size);
  }
}

void CudaTable::Impl::MakeRoom(const uint64_t* keys, int64_t num_keys, const uint32_t* num_actual,
                               int64_t num_missing, uint64_t round) {
  PollCounters(round);
  const int64_t num_given = num_keys;
  if (num_missing < 0 && MayFill(num_keys)) {
    std::vector<Newcomers> self = {{this, keys, Count(num_keys, num_actual)}};
    LearnMisses(stream, &self);
    num_missing = self[0].num_missing;
  }
  if (num_missing >= 0) num_keys = num_missing;
  if (!HasRoom(num_keys)) WaitForCopy();  // of an earlier batch: the device has later work
  if (!HasRoom(num_keys)) {
    LearnCounters();
    const int64_t actual_keys = OnHost(stream, {num_given, num_actual});
    if (num_missing < 0) num_keys = actual_keys;
    // Memory is for new keys, each once; with `num_actual` keys are unique already.
    if (size.known() + num_keys > most() || (num_actual == nullptr && !HasRoom(num_keys))) {
      num_keys = CountNew(keys, actual_keys);
      if (size.known() + num_keys > most()) {
        throw std::length_error(
            "A table must not grow beyond max_capacity=" + std::to_string(most()) +
            ". Received: " + std::to_string(num_keys) + " new keys at size " +
            std::to_string(size.known()) + " (table '" + options.name + "')");
      }
    }
    // Present keys come again. A batch of them must find room, or each would wait and count here.
    GrowFor(num_keys, std::min(actual_keys - num_keys, size.known()));
  }
  CountBatch(num_keys);
}

int64_t CudaTable::Impl::CountNew(const uint64_t* keys, int64_t num_keys) {
  const Workspace::Scope scope(workspace, stream);
  uint32_t* const row_numbers = workspace.Take<uint32_t>(num_keys);
  uint8_t* const first = workspace.Take<uint8_t>(num_keys);
  uint32_t* const count = workspace.Take<uint32_t>(1);
  FindKeys(stream, {{Ref(), keys, num_keys, row_numbers}});
  ChooseOccurrence(stream, workspace, keys, num_keys, Occurrence::kFirst, first);
  FillWithZeros(stream, count, sizeof(uint32_t));
  CountMissing(stream, row_numbers, first, num_keys, count);
  uint32_t host_count = 0;
  CopyToHost(stream, &host_count, count, sizeof(host_count));
  return host_count;
}

void CudaTable::Impl::GrowFor(int64_t num_keys, int64_t ahead, int64_t most_rows) {
  // Room for a second batch of this size, if that is little: otherwise a table that is nearly full
  // would have to learn its size before every batch.
  ahead = std::max(ahead, std::min(num_keys, size.known() / 8));
  const int64_t wanted = size.known() + num_keys + ahead;
  if (used.known() + num_keys + ahead > MaxUsed(num_buckets)) {
    int64_t new_num_buckets = num_buckets;
    // Keeps its size only if that frees a good part of the slots; else it would rehash again soon.
    if (wanted > num_buckets * kBucketSlots * max_load_factor * 7 / 8) new_num_buckets *= 2;
    while (wanted > MaxUsed(new_num_buckets)) new_num_buckets *= 2;
    ResizeIndex(new_num_buckets);
  }
  const int64_t allocated = arena.num_chunks * chunk_rows();
  const int64_t rows_wanted = std::min(rows.known() + num_keys + ahead, most_rows);
  if (rows_wanted > allocated) {
    const int64_t target = std::min(std::max(rows_wanted, allocated + allocated / 8), most_rows);
    arena.Reserve(stream, (target + chunk_rows() - 1) / chunk_rows(), chunk_rows());
  }
}

// The counters must be known exactly.
void CudaTable::Impl::ResizeIndex(int64_t new_num_buckets) {
  Buffer new_buckets(static_cast<size_t>(new_num_buckets) * sizeof(Bucket), stream);
  new_buckets.Zero();
  const IndexRef to(new_buckets.as<Bucket>(), new_num_buckets);
  if (size.known() > 0) Rehash(stream, Ref().index, to, counters.as<Counters>());
  buckets = std::move(new_buckets);  // the old ones are freed in the order of the stream
  num_buckets = new_num_buckets;
  if (size.known() > 0) used.Set(size.known());
}

InsertBatch CudaTable::Impl::MakeInsert(const uint64_t* keys, int64_t num_keys,
                                        uint32_t* row_numbers, uint8_t* inserted,
                                        const uint32_t* num_actual, int64_t num_missing,
                                        uint64_t round) {
  MakeRoom(keys, num_keys, num_actual, num_missing, round);
  const bool copy = !size.copy_under_way();  // a copy under way still writes to host_counters
  return {Ref(),       keys,     Count(num_keys, num_actual),
          row_numbers, inserted, copy ? host_counters : nullptr};
}

void CudaTable::Impl::ReserveFreeRows() {
  // Each row number that was ever given out may come back.
  const int64_t most_rows = std::min(rows.bound(), arena.num_chunks * chunk_rows());
  const size_t bytes = static_cast<size_t>(most_rows) * sizeof(uint32_t);
  if (bytes <= free_rows.bytes()) return;
  Buffer larger(bytes + bytes / 4, stream);
  larger.Zero();  // growing copies all of it, even what was never written
  if (free_rows.bytes() > 0) {
    CopyOnDevice(stream, larger.data(), free_rows.data(), free_rows.bytes());
  }
  free_rows = std::move(larger);
}

void CudaTable::Reserve(CallContext context, int64_t num_keys) {
  Impl& impl = *impl_;
  const auto lock = impl.Enter(context.stream());
  if (num_keys > impl.most()) {
    throw std::length_error("Reserve must not exceed max_capacity=" + std::to_string(impl.most()) +
                            ". Received: " + std::to_string(num_keys) + " (table '" +
                            impl.options.name + "')");
  }
  if (impl.is_direct()) return;  // has room for all its keys
  impl.LearnCounters();
  const int64_t more = num_keys - impl.size.known();
  if (more > 0 && !impl.HasRoom(more)) impl.GrowFor(more);
}

int64_t CudaTable::Size(CallContext context) const {
  const auto lock = impl_->Enter(context.stream());
  impl_->LearnCounters();
  return impl_->size.known();
}

}  // namespace cuda
}  // namespace sok
