// Changes since a dump: the calls of CpuTable that begin a log of changes and read it.
#include <stdexcept>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {

std::vector<uint64_t> CpuTable::Impl::BeginChanges(Executor& ex, int64_t since,
                                                   TableChanges* result) {
  ChangeLog::Interval interval;
  if (since != 0 && (changes == nullptr || !changes->Has(since))) {
    throw std::invalid_argument(
        "A delta needs the changes since the dump that it follows. Received: table '" +
        options.name + "', which no longer has them; the next dump must be a full one");
  }
  if (options.policy.evicts_on_call()) Evict(ex);
  std::vector<uint64_t> present;
  if (since != 0) interval = changes->Since(since);
  if (since == 0 || interval.whole) {
    result->whole = true;
    CatchUpAll(ex);
  } else {
    const int64_t num_touched = static_cast<int64_t>(interval.touched.size());
    const Scratch<uint32_t> rows(num_touched);
    FindRows(ex, interval.touched.data(), num_touched, rows.get());
    std::vector<uint32_t> owing;
    for (int64_t i = 0; i < num_touched; ++i) {
      if (rows[i] == kNoRow) continue;
      present.push_back(interval.touched[i]);
      owing.push_back(rows[i]);
    }
    if (Pending()) {  // the others stay as they are: the delta's reader replays their steps
      const int64_t num_owing = static_cast<int64_t>(owing.size());
      ForEachPart(ex, owing.data(), num_owing, RowUse::kScanWrite, [&](int64_t from, int64_t to) {
        ex.ParallelFor(to - from, 512, [&](int64_t begin, int64_t end) {
          for (int64_t i = from + begin; i < from + end; ++i) {
            catch_up->Apply(arena->Row(owing[i]));
          }
        });
      });
      ++version;
    }
    const int64_t num_erased = static_cast<int64_t>(interval.erased.size());
    const Scratch<uint32_t> erased_rows(num_erased);
    FindRows(ex, interval.erased.data(), num_erased, erased_rows.get());
    for (int64_t i = 0; i < num_erased; ++i) {
      if (erased_rows[i] == kNoRow) result->erased.push_back(interval.erased[i]);
    }
    if (!interval.steps.empty()) {
      result->steps = std::move(interval.steps);
      if (catch_up != nullptr) result->optimizer = catch_up->ToString();
    }
  }
  if (changes == nullptr) changes = std::make_unique<ChangeLog>();
  result->number = changes->Begin(next_row);
  return present;
}

int64_t CpuTable::KeepChanges(CallContext) {
  const ExclusiveLock lock(impl_->mutex);
  auto changes = std::make_unique<ChangeLog>();
  const int64_t number = changes->Begin(impl_->next_row);
  // The rows owe nothing; those of the table that wrote the dump may have owed steps.
  changes->CaughtUp();
  // A delta of other slot variables than its base has could not be read: it must hold all keys.
  if (!SameSavedSlots(impl_->imported_slots, impl_->slots)) changes->TouchAll();
  impl_->changes = std::move(changes);
  return number;
}

}  // namespace sok
