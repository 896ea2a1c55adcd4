// What changed since a dump: the calls of CpuTable that begin a log of changes and read it.
#include <mutex>
#include <stdexcept>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {

TableChanges CpuTable::ExportChanges(CallContext context, int64_t since) {
  Executor& ex = context.threads();
  const std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  Impl& impl = *impl_;
  TableChanges changes;
  ChangeLog::Interval interval;
  if (since != 0 && (impl.changes == nullptr || !impl.changes->Has(since))) {
    throw std::invalid_argument(
        "A table must keep what changed since the dump that a delta follows. "
        "Received: table '" +
        impl.options.name + "', which does not any more; the next dump must be a full one");
  }
  if (impl.options.policy.evicts_on_call()) impl.Evict(ex);
  std::vector<Impl::Entry> entries;
  if (since != 0) interval = impl.changes->Since(since);
  if (since == 0 || interval.whole) {
    changes.whole = true;
    impl.CatchUpAll(ex);
    entries = impl.SortedEntries(ex);
  } else {
    const int64_t num_touched = static_cast<int64_t>(interval.touched.size());
    const Scratch<uint32_t> rows(num_touched);
    FindRows(ex, interval.touched.data(), num_touched, rows.get());
    for (int64_t i = 0; i < num_touched; ++i) {
      if (rows[i] != kNoRow) entries.push_back({interval.touched[i], rows[i]});
    }
    if (impl.Pending()) {  // the others stay as they are: who reads the delta replays the steps
      ex.ParallelFor(static_cast<int64_t>(entries.size()), 512, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) impl.catch_up->Apply(Row(entries[i].row));
      });
      ++impl.version;
    }
    const int64_t num_erased = static_cast<int64_t>(interval.erased.size());
    const Scratch<uint32_t> erased_rows(num_erased);
    FindRows(ex, interval.erased.data(), num_erased, erased_rows.get());
    for (int64_t i = 0; i < num_erased; ++i) {
      if (erased_rows[i] == kNoRow) changes.erased.push_back(interval.erased[i]);
    }
    if (!interval.steps.empty()) {
      changes.steps = std::move(interval.steps);
      if (impl.catch_up != nullptr) changes.optimizer = impl.catch_up->ToString();
    }
  }
  changes.snapshot = impl.SnapshotOf(ex, entries, /*with_slots=*/true);
  if (impl.changes == nullptr) impl.changes = std::make_unique<ChangeLog>();
  changes.number = impl.changes->Begin(impl.next_row);
  return changes;
}

int64_t CpuTable::KeepChanges(CallContext) {
  const std::unique_lock<std::shared_mutex> lock(impl_->mutex);
  auto changes = std::make_unique<ChangeLog>();
  const int64_t number = changes->Begin(impl_->next_row);
  // The rows owe nothing, which those of the dump's own table may have.
  changes->CaughtUp();
  impl_->changes = std::move(changes);
  return number;
}

}  // namespace sok
