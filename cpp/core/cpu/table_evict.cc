// Eviction: which keys lose their row, and what happens to it.
//
//     full: lowest scores (ChooseEvicted)  |  EvictRows: row -> buffer, key out of the index,
//     on request (Evict)                   |             row number free for the next new key
//     written beyond max_capacity          |
//       (EvictSurplus)                     |
//
// Choosing keys may fail and changes nothing. EvictRows cannot fail, so it comes after everything
// that can: a call that throws has evicted nothing. Only the surplus of a write goes after the write:
// its keys have their scores then.
//
// A row is brought up to date before it goes to the buffer. The next key with its row number starts
// from an initial row and initial slot rows, like any new key.
#include <algorithm>
#include <new>

#include "cpp/core/cpu/records.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

// Marks the rows of a batch, which must stay.
class KeptRows {
 public:
  KeptRows(RowMarks* marks, const uint32_t* rows, int64_t num_rows, int64_t end_row)
      : marks_(*marks), rows_(rows), num_rows_(num_rows) {
    marks_.Reserve(end_row);
    for (int64_t i = 0; i < num_rows; ++i) count_ += rows[i] != kNoRow && marks_.Mark(rows[i]);
  }
  ~KeptRows() {
    for (int64_t i = 0; i < num_rows_; ++i) {
      if (rows_[i] != kNoRow) marks_.Unmark(rows_[i]);
    }
  }
  KeptRows(const KeptRows&) = delete;
  bool Has(uint32_t row) const { return marks_.Has(row); }
  int64_t count() const { return count_; }  // each row once

 private:
  RowMarks& marks_;
  const uint32_t* const rows_;
  const int64_t num_rows_;
  int64_t count_ = 0;
};

}  // namespace

void CpuTable::Impl::ChooseEvicted(Executor& ex, int64_t num_new, const Insertion& insertion,
                                   Eviction* eviction) {
  TableRecords& rec = *records;
  if (!rec.options.evicts_by_score()) return;
  if (insertion.may_exceed && is_aside)
    return;  // all in the end: a later part may have lower scores
  int64_t excess = size + num_new - options.max_capacity;
  if (rec.queue.IsStale(size)) rec.queue.Clear();
  // The queue gets the keys that the table has while its last eighth fills up: nine rows per new key.
  if (excess <= 0) {
    if (excess + options.max_capacity / 8 > 0) {
      rec.EnterRows(std::min(next_row, rec.queue.num_rows() + 9 * num_new), num_new);
    }
    return;
  }
  const KeptRows kept(&rec.marks, insertion.kept_rows, insertion.num_kept_rows, next_row);
  if (insertion.may_exceed) {
    excess = std::min(excess, size - kept.count());
  } else {
    CheckBatchFits(num_new, kept.count(), options.max_capacity, options.name);
  }
  rec.EnterRows(next_row, num_new);
  TakeLowest(ex, excess, [&kept](uint32_t row) { return kept.Has(row); }, eviction);
}

template <typename IsKept>
void CpuTable::Impl::TakeLowest(Executor& ex, int64_t count, IsKept is_kept, Eviction* eviction) {
  TableRecords& rec = *records;
  eviction->queue = &rec.queue;
  eviction->entries = rec.queue.Take(
      count,
      [&rec](const EvictionQueue::Entry& entry) {
        return rec.IsAt(entry.row, entry.key) ? rec.Score(entry.row) : nullptr;
      },
      is_kept);
  PrepareEviction(ex, eviction);
}

int64_t CpuTable::Impl::EvictSurplus(Executor& ex) {
  TableRecords& rec = *records;
  const int64_t surplus = size - options.max_capacity;
  if (surplus <= 0) return 0;
  try {
    if (rec.queue.IsStale(size)) rec.queue.Clear();
    rec.EnterRows(next_row, 0);
    Eviction eviction;
    TakeLowest(ex, surplus, [](uint32_t) { return false; }, &eviction);
    EvictRows(&eviction);
  } catch (const std::bad_alloc&) {
    if (is_aside) throw;
    // The keys have been written already. The next new key evicts the surplus, too.
  }
  return surplus;
}

void CpuTable::Impl::PrepareEviction(Executor& ex, Eviction* eviction) {
  TableRecords& rec = *records;
  const int64_t count = eviction->size();
  if (count == 0) return;
  // Twice as much as now, or more: the numbers come back at each call.
  const size_t most = free_rows.size() + static_cast<size_t>(count);
  if (most > free_rows.capacity()) free_rows.reserve(std::max(most, 2 * free_rows.capacity()));
  const int64_t keep = std::min(rec.options.evicted_buffer, count);
  rec.buffer.SetSlots(slots);
  eviction->buffered = rec.buffer.MakeRows(keep, options.dim);
  if (!arena->is_on_disk()) return;
  std::vector<uint32_t> kept;
  for (int64_t i = count - keep; i < count; ++i) kept.push_back(eviction->entries[i].row);
  arena->Bring(ex, kept.data(), keep, RowUse::kScanWrite);
}

void CpuTable::Impl::EvictRows(Eviction* eviction) noexcept {
  const int64_t count = eviction->size();
  if (count == 0) return;
  TableRecords& rec = *records;
  ++version;
  const bool pending = Pending();
  const int64_t keep = static_cast<int64_t>(eviction->buffered.size());
  auto to = eviction->buffered.begin();
  for (int64_t i = 0; i < count; ++i) {
    const EvictionQueue::Entry& entry = eviction->entries[i];
    Leave(entry.key, entry.row);
    if (i >= count - keep) {
      float* const row = arena->Row(entry.row);
      if (pending) catch_up->Apply(row);  // buffered rows owe nothing
      to->record = rec.records[entry.row];
      ReadRow(row, to->row.data());
      CopySavedSlots(slots, row + format.embedding_floats(), to->slot_row.data());
      ++to;
    }
    const uint64_t hash = HashKey(entry.key);
    shards[HashShard(hash)].Erase(hash, entry.key);
    rec.Remove(entry.row);
    free_rows.push_back(entry.row);
  }
  size -= count;
  rec.statistics.evicted += count;
  rec.statistics.dropped += count - keep;
  rec.statistics.dropped +=
      rec.buffer.Append(std::move(eviction->buffered), rec.options.evicted_buffer);
  eviction->entries.clear();  // not to be put back
}

int64_t CpuTable::Evict(CallContext context) {
  const ExclusiveLock lock(impl_->mutex);
  return impl_->Evict(context.threads());
}

int64_t CpuTable::Impl::Evict(Executor& ex) {
  TableRecords& rec = Records();
  const PolicyOptions& policy = rec.options;
  // All rows, not only those judged: a delta's reader does the same, and has no rows to judge by.
  if (policy.l2_threshold >= 0.0f && Pending()) CatchUpAll(ex);
  std::vector<uint8_t> goes(static_cast<size_t>(next_row));
  const auto judge = [&](int64_t first, int64_t last) {
    ex.ParallelFor(last - first, 1024, [&](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(options.dim));
      for (int64_t row = first + begin; row < first + end; ++row) {
        const int64_t last_step = rec.records[row].last_step;
        if (last_step < 0) continue;
        goes[row] = IsOutlived(rec.step, last_step, policy.steps_to_live);
        if (goes[row] || policy.l2_threshold < 0.0f) continue;
        ReadRow(arena->Row(static_cast<uint32_t>(row)), values.data());
        goes[row] = HalfSumOfSquares(values.data(), options.dim) < policy.l2_threshold;
      }
    });
  };
  if (policy.l2_threshold < 0.0f) {
    judge(0, next_row);
  } else {
    ForEachRange(ex, next_row, RowUse::kScan, judge);
  }
  Eviction eviction;
  std::vector<EvictionQueue::Entry>& entries = eviction.entries;
  for (int64_t row = 0; row < next_row; ++row) {
    if (goes[row]) entries.push_back({0, rec.records[row].key, static_cast<uint32_t>(row)});
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.key < b.key; });
  PrepareEviction(ex, &eviction);
  const int64_t num_evicted = eviction.size();
  EvictRows(&eviction);
  if (rec.filter != nullptr && policy.steps_to_live > 0) {
    rec.filter->Expire(rec.step, policy.steps_to_live);
  }
  return num_evicted;
}

EvictedRows CpuTable::PopEvicted() {
  const ExclusiveLock lock(impl_->mutex);
  TableRecords& rec = impl_->Records();
  rec.buffer.SetSlots(impl_->slots);
  EvictedRows popped = rec.buffer.Pop();
  rec.statistics.popped += static_cast<int64_t>(popped.keys.size());
  return popped;
}

}  // namespace sok
