// Eviction: which keys lose their row, and what becomes of it.
//
//     full: lowest scores (MakeRoomByScore)  |  EvictRows: row -> buffer, key out of the index,
//     when called for (Evict)                |             row number free for the next new key
//
// A row is brought up to the present before it is handed back. Who takes its place starts from an
// initial row and initial slot rows, as everywhere.
#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "cpp/core/cpu/records.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {

void CpuTable::Impl::MakeRoomByScore(int64_t num_new, const uint32_t* rows, int64_t num_rows) {
  TableRecords& rec = *records;
  const int64_t excess = size + num_new - options.max_capacity;
  if (rec.options.score == ScoreKind::kNone || excess <= 0) return;
  std::vector<bool> is_kept(static_cast<size_t>(next_row));
  int64_t num_kept = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (rows[i] == kNoRow || is_kept[rows[i]]) continue;
    is_kept[rows[i]] = true;
    ++num_kept;
  }
  if (num_kept + num_new > options.max_capacity) {
    throw std::length_error(
        "A batch must not need more than max_capacity=" + std::to_string(options.max_capacity) +
        " rows. Received: " + std::to_string(num_new) + " new keys beside " +
        std::to_string(num_kept) + " that are there (table '" + options.name + "')");
  }
  if (!rec.queue.is_built() || rec.queue.IsStale(size)) {
    std::vector<EvictionQueue::Entry> entries;
    entries.reserve(static_cast<size_t>(size + num_new));
    for (int64_t row = 0; row < next_row; ++row) {
      const KeyRecord& record = rec.records[row];
      if (record.last_step < 0) continue;
      const uint32_t r = static_cast<uint32_t>(row);
      entries.push_back({*rec.Score(r), record.key, r});
    }
    rec.queue.Build(std::move(entries));
  }
  EvictRows(rec.queue.Take(
      excess,
      [&rec](const EvictionQueue::Entry& entry) {
        return rec.IsAt(entry.row, entry.key) ? rec.Score(entry.row) : nullptr;
      },
      [&is_kept](uint32_t row) { return static_cast<bool>(is_kept[row]); }));
}

void CpuTable::Impl::EvictRows(const std::vector<EvictionQueue::Entry>& entries) {
  TableRecords& rec = *records;
  if (entries.empty()) return;
  const int64_t count = static_cast<int64_t>(entries.size());
  free_rows.reserve(free_rows.size() + entries.size());
  const int64_t keep = std::min(rec.options.evicted_buffer, count);
  BufferSlots();
  std::deque<TableRecords::EvictedRow> evicted;
  for (int64_t i = count - keep; i < count; ++i) {
    evicted.push_back({rec.records[entries[i].row], std::vector<float>(options.dim), {}});
    int64_t width = 0;
    for (int64_t w : rec.buffer_slot_widths) width += w;
    evicted.back().slot_row.resize(static_cast<size_t>(width));
  }
  // From here on nothing fails.
  ++version;
  const bool pending = Pending();
  for (int64_t i = 0; i < count; ++i) {
    const EvictionQueue::Entry& entry = entries[i];
    if (i >= count - keep) {
      float* const row = arena->Row(entry.row);
      if (pending) catch_up->Apply(row);  // what is handed back owes nothing
      TableRecords::EvictedRow& to = evicted[i - (count - keep)];
      std::copy_n(row, options.dim, to.row.data());
      CopySavedSlots(row, to.slot_row.data());
    }
    const uint64_t hash = HashKey(entry.key);
    shards[HashShard(hash)].Erase(hash, entry.key);
    rec.Remove(entry.row);
    free_rows.push_back(entry.row);
  }
  size -= count;
  rec.statistics.evicted += count;
  rec.statistics.dropped += count - keep;
  while (static_cast<int64_t>(rec.buffer.size()) + keep > rec.options.evicted_buffer) {
    rec.buffer.pop_front();
    ++rec.statistics.dropped;
  }
  for (TableRecords::EvictedRow& row : evicted) rec.buffer.push_back(std::move(row));
}

void CpuTable::Impl::CopySavedSlots(const float* row, float* slot_row) const {
  int64_t offset = options.dim;
  for (const SlotSpec& spec : slots) {
    if (spec.saved) slot_row = std::copy_n(row + offset, spec.width, slot_row);
    offset += spec.width;
  }
}

// Brings the buffered rows to the slots of the day: slots of equal name and width stay.
void CpuTable::Impl::BufferSlots() {
  TableRecords& rec = *records;
  std::vector<std::string> names;
  std::vector<int64_t> widths;
  std::vector<float> initial;
  for (const SlotSpec& spec : slots) {
    if (!spec.saved) continue;
    names.push_back(spec.name);
    widths.push_back(spec.width);
    initial.insert(initial.end(), static_cast<size_t>(spec.width), spec.initial);
  }
  if (names == rec.buffer_slot_names && widths == rec.buffer_slot_widths) return;
  std::vector<std::vector<float>> slot_rows;
  for (const TableRecords::EvictedRow& row : rec.buffer) {
    std::vector<float> slot_row = initial;
    int64_t from = 0;
    for (size_t old = 0; old < rec.buffer_slot_names.size(); ++old) {
      int64_t to = 0;
      for (size_t s = 0; s < names.size(); ++s) {
        if (names[s] == rec.buffer_slot_names[old] && widths[s] == rec.buffer_slot_widths[old]) {
          std::copy_n(row.slot_row.begin() + from, widths[s], slot_row.begin() + to);
        }
        to += widths[s];
      }
      from += rec.buffer_slot_widths[old];
    }
    slot_rows.push_back(std::move(slot_row));
  }
  for (size_t i = 0; i < slot_rows.size(); ++i) rec.buffer[i].slot_row = std::move(slot_rows[i]);
  rec.buffer_slot_names = std::move(names);
  rec.buffer_slot_widths = std::move(widths);
}

int64_t CpuTable::Evict(Executor& ex) {
  const std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  return impl_->Evict(ex);
}

int64_t CpuTable::Impl::Evict(Executor& ex) {
  TableRecords& rec = Records();
  const PolicyOptions& policy = rec.options;
  const bool pending = Pending();
  std::vector<uint8_t> goes(static_cast<size_t>(next_row));
  ex.ParallelFor(next_row, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t last_step = rec.records[row].last_step;
      if (last_step < 0) continue;
      goes[row] = IsOutlived(rec.step, last_step, policy.steps_to_live);
      if (goes[row] || policy.l2_threshold < 0.0f) continue;
      float* const values = arena->Row(static_cast<uint32_t>(row));
      if (pending) catch_up->Apply(values);
      goes[row] = HalfSumOfSquares(values, options.dim) < policy.l2_threshold;
    }
  });
  std::vector<EvictionQueue::Entry> entries;
  for (int64_t row = 0; row < next_row; ++row) {
    if (goes[row]) entries.push_back({0, rec.records[row].key, static_cast<uint32_t>(row)});
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.key < b.key; });
  EvictRows(entries);
  if (rec.filter != nullptr && policy.steps_to_live > 0) {
    rec.filter->Expire(rec.step, policy.steps_to_live);
  }
  return static_cast<int64_t>(entries.size());
}

EvictedRows CpuTable::PopEvicted() {
  const std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  TableRecords& rec = impl_->Records();
  impl_->BufferSlots();
  EvictedRows popped;
  popped.slot_names = rec.buffer_slot_names;
  popped.slot_widths = rec.buffer_slot_widths;
  for (const TableRecords::EvictedRow& row : rec.buffer) {
    popped.keys.push_back(row.record.key);
    popped.frequencies.push_back(row.record.frequency);
    popped.last_steps.push_back(row.record.last_step);
    popped.rows.insert(popped.rows.end(), row.row.begin(), row.row.end());
    popped.slot_rows.insert(popped.slot_rows.end(), row.slot_row.begin(), row.slot_row.end());
  }
  rec.statistics.popped += static_cast<int64_t>(rec.buffer.size());
  rec.buffer.clear();
  return popped;
}

}  // namespace sok
