#include "cpp/core/evicted_buffer.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

namespace sok {

void EvictedBuffer::SetSlots(const std::vector<SlotVariableSpec>& slots) {
  std::vector<std::string> names;
  std::vector<int64_t> widths;
  std::vector<float> initial;
  for (const SlotVariableSpec& spec : slots) {
    if (!spec.saved) continue;
    names.push_back(spec.name);
    widths.push_back(spec.width);
    initial.insert(initial.end(), static_cast<size_t>(spec.width), spec.initial);
  }
  if (names == names_ && widths == widths_) return;
  std::vector<std::vector<float>> slot_rows;
  for (const EvictedRow& row : rows_) {
    std::vector<float> slot_row = initial;
    int64_t from = 0;
    for (size_t old = 0; old < names_.size(); ++old) {
      int64_t to = 0;
      for (size_t s = 0; s < names.size(); ++s) {
        if (names[s] == names_[old] && widths[s] == widths_[old]) {
          std::copy_n(row.slot_row.begin() + from, widths[s], slot_row.begin() + to);
        }
        to += widths[s];
      }
      from += widths_[old];
    }
    slot_rows.push_back(std::move(slot_row));
  }
  auto row = rows_.begin();
  for (std::vector<float>& slot_row : slot_rows) (row++)->slot_row = std::move(slot_row);
  names_ = std::move(names);
  widths_ = std::move(widths);
}

std::list<EvictedRow> EvictedBuffer::MakeRows(int64_t count, int64_t dim) const {
  const int64_t width = std::accumulate(widths_.begin(), widths_.end(), int64_t{0});
  std::list<EvictedRow> rows(static_cast<size_t>(count));
  for (EvictedRow& row : rows) {
    row.row.resize(static_cast<size_t>(dim));
    row.slot_row.resize(static_cast<size_t>(width));
  }
  return rows;
}

int64_t EvictedBuffer::Append(std::list<EvictedRow> rows, int64_t most) noexcept {
  rows_.splice(rows_.end(), rows);
  int64_t num_dropped = 0;
  for (; size() > most; ++num_dropped) rows_.pop_front();
  return num_dropped;
}

int64_t EvictedBuffer::Forget(const uint64_t* keys, int64_t num_keys) {
  if (rows_.empty()) return 0;
  const std::unordered_set<uint64_t> forgotten(keys, keys + num_keys);
  const int64_t before = size();
  rows_.remove_if([&](const EvictedRow& row) { return forgotten.count(row.record.key) > 0; });
  return before - size();
}

EvictedRows EvictedBuffer::Pop() {
  EvictedRows popped;
  popped.slot_names = names_;
  popped.slot_widths = widths_;
  for (const EvictedRow& row : rows_) {
    popped.keys.push_back(row.record.key);
    popped.frequencies.push_back(row.record.frequency);
    popped.last_steps.push_back(row.record.last_step);
    popped.rows.insert(popped.rows.end(), row.row.begin(), row.row.end());
    popped.slot_rows.insert(popped.slot_rows.end(), row.slot_row.begin(), row.slot_row.end());
  }
  rows_.clear();
  return popped;
}

}  // namespace sok
