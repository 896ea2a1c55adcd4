// Changes since a dump: the calls of CpuTable that begin a log of changes and read it.
#include <stdexcept>
#include <utility>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {

ChangeLog::Interval CpuTable::Impl::BeginChanges(Executor& ex, int64_t since,
                                                 TableChanges* result) {
  ChangeLog::Interval interval;
  if (since != 0 && (changes == nullptr || !changes->Has(since))) {
    throw std::invalid_argument(
        "A delta needs the changes since the dump that it follows. Received: table '" +
        options.name + "', which no longer has them; the next dump must be a full one");
  }
  if (options.policy.evicts_on_call()) Evict(ex);
  if (since != 0) interval = changes->Since(since);
  if (since == 0 || interval.whole) {
    result->whole = true;
    CatchUpAll(ex);
  } else {
    if (Pending()) {  // the others stay as they are: the delta's reader replays their steps
      interval.Sort();
      const int64_t num_touched = static_cast<int64_t>(interval.touched.size());
      const Scratch<uint32_t> rows(num_touched);
      FindRows(ex, interval.touched.data(), num_touched, rows.get());
      if (instant != nullptr) instant->Save(ex, interval.touched.data(), rows.get(), num_touched);
      ForEachPart(ex, rows.get(), num_touched, RowUse::kScanWrite, [&](int64_t from, int64_t to) {
        ex.ParallelFor(to - from, 512, [&](int64_t begin, int64_t end) {
          for (int64_t i = from + begin; i < from + end; ++i) {
            if (rows[i] != kNoRow) catch_up->Apply(arena->Row(rows[i]));
          }
        });
      });
      ++version;
    }
    if (!interval.steps.empty()) {
      result->steps = std::move(interval.steps);
      if (catch_up != nullptr) result->optimizer = catch_up->ToString();
    }
  }
  if (changes == nullptr) changes = std::make_unique<ChangeLog>();
  result->number = changes->Begin(next_row);
  return interval;
}

void CpuTable::Impl::ListChanges(Executor& ex, ChangeLog::Interval* interval,
                                 std::vector<uint64_t>* erased) const {
  interval->Sort();
  // Calls keep(key, whether it is present) for each key.
  const auto for_each = [&](const std::vector<uint64_t>& keys, const auto& keep) {
    const int64_t num_keys = static_cast<int64_t>(keys.size());
    const Scratch<uint32_t> rows(num_keys);
    FindRows(ex, keys.data(), num_keys, rows.get());
    for (int64_t i = 0; i < num_keys; ++i) keep(keys[i], rows[i] != kNoRow);
  };
  for_each(interval->erased, [&](uint64_t key, bool is_present) {
    if (!is_present) erased->push_back(key);
  });
  int64_t num_present = 0;
  for_each(interval->touched, [&](uint64_t key, bool is_present) {
    if (is_present) interval->touched[num_present++] = key;
  });
  interval->touched.resize(static_cast<size_t>(num_present));
}

int64_t CpuTable::KeepChanges(CallContext) {
  const ExclusiveLock lock(impl_->mutex);
  auto changes = std::make_unique<ChangeLog>();
  const int64_t number = changes->Begin(impl_->next_row);
  // The rows owe nothing; those of the table that wrote the dump may have owed steps.
  changes->CaughtUp();
  // A delta of other slot variables than its base has could not be read: it must hold all keys.
  const bool same_slots = SameSavedSlots(impl_->imported_slots, impl_->slots);
  // So must a delta to a dump of which not all keys had room.
  const bool same_keys = impl_->records == nullptr || impl_->records->statistics.evicted == 0;
  if (!same_slots || !same_keys) changes->TouchAll();
  impl_->changes = std::move(changes);
  return number;
}

}  // namespace sok
