#include "cpp/core/cpu/change_log.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "cpp/core/hash.h"

namespace sok {
namespace {

// Keys allowed beyond the number of rows: small tables may change often.
constexpr size_t kFreeKeys = size_t{1} << 16;
// Runs of steps, beyond one for eight rows: replaying more would take longer than reading all rows.
constexpr size_t kFreeRuns = size_t{1} << 12;
constexpr int64_t kAhead = 24;  // rows whose marks are asked for before they are read

size_t NumKeys(const ChangeLog::Interval& interval) {
  return interval.touched.size() + interval.erased.size();
}

void SortUnique(std::vector<uint64_t>* keys) {
  std::sort(keys->begin(), keys->end());
  keys->erase(std::unique(keys->begin(), keys->end()), keys->end());
}

// Appends `run`, or extends the last run if `run` continues it.
void Add(const StepRun& run, std::vector<StepRun>* runs) {
  if (!runs->empty()) {
    StepRun& last = runs->back();
    if (run.count == 0 && last.count == 0) return;
    if (run.count > 0 && last.count > 0 && last.learning_rate == run.learning_rate &&
        last.step + last.count == run.step) {
      last.count += run.count;
      return;
    }
  }
  runs->push_back(run);
}

}  // namespace

void ChangeLog::Interval::Sort() {
  SortUnique(&touched);
  SortUnique(&erased);
}

void ChangeLog::Grow(size_t num_rows) {
  if (num_rows <= last_.size()) return;
  last_.reserve(num_rows);  // exactly, not twice as much
  last_.resize(num_rows);
}

int64_t ChangeLog::Begin(int64_t num_rows) {
  static std::atomic<int64_t> last_number{0};
  Grow(static_cast<size_t>(num_rows));
  Interval next;
  next.mark = intervals_.empty() ? 1 : intervals_.back().mark + 1;
  if (next.mark == 0) {  // after 2^32 dumps
    std::fill(last_.begin(), last_.end(), 0);
    intervals_.clear();
    next.mark = 1;
  }
  intervals_.push_back(std::move(next));
  intervals_.back().number = ++last_number;
  // Usually only the last interval is asked for.
  size_t num_keys = 0, kept = 1;
  for (; kept < intervals_.size(); ++kept) {
    num_keys += NumKeys(intervals_[intervals_.size() - 1 - kept]);
    if (kept > 1 && num_keys > last_.size() + kFreeKeys) break;
  }
  intervals_.erase(intervals_.begin(), intervals_.end() - static_cast<int64_t>(kept));
  return intervals_.back().number;
}

bool ChangeLog::TooMany(const Interval& interval) const {
  return NumKeys(interval) > 2 * last_.size() + kFreeKeys ||
         interval.steps.size() > last_.size() / 8 + kFreeRuns;
}

void ChangeLog::Shrink(Interval* interval) noexcept {
  interval->whole = true;
  std::vector<uint64_t>().swap(interval->touched);
  std::vector<uint64_t>().swap(interval->erased);
  std::vector<StepRun>().swap(interval->steps);  // its rows will owe none
}

// Calls log(interval) with the present interval. If memory is short, or the interval has become too
// large, it is `whole`.
template <typename Log>
void ChangeLog::Try(const Log& log) noexcept {
  if (intervals_.empty()) return;
  Interval& now = intervals_.back();
  try {
    log(now);
    if (TooMany(now)) Shrink(&now);
  } catch (const std::bad_alloc&) {
    Shrink(&now);
  }
}

void ChangeLog::Touch(const uint64_t* keys, const uint32_t* rows, int64_t num_keys) noexcept {
  Try([&](Interval& now) {
    if (now.whole) return;
    for (int64_t i = 0; i < num_keys; ++i) {
      const uint32_t row = rows[i];
      if (i + kAhead < num_keys && rows[i + kAhead] < last_.size()) {
        __builtin_prefetch(&last_[rows[i + kAhead]], 1);
      }
      if (row == kNoRow) continue;
      if (row >= last_.size()) Grow(row + size_t{1} + row / 8);
      if (last_[row] == now.mark) continue;
      last_[row] = now.mark;
      now.touched.push_back(keys[i]);
    }
  });
}

void ChangeLog::Erase(uint64_t key, uint32_t row) noexcept {
  Try([&](Interval& now) {
    if (row < last_.size()) last_[row] = 0;  // the next key in this row is a different one
    if (!now.whole) now.erased.push_back(key);
  });
}

void ChangeLog::TouchAll() noexcept {
  if (!intervals_.empty()) Shrink(&intervals_.back());
}

void ChangeLog::Step(double learning_rate, int64_t step) noexcept {
  Try([&](Interval& now) {
    if (!now.whole) Add({1, learning_rate, step}, &now.steps);
  });
}

void ChangeLog::CaughtUp() noexcept {
  Try([&](Interval& now) {
    if (!now.whole) Add({}, &now.steps);
  });
}

bool ChangeLog::has_steps() const {
  for (const Interval& interval : intervals_) {
    for (const StepRun& run : interval.steps) {
      if (run.count > 0) return true;
    }
  }
  return false;
}

bool ChangeLog::Has(int64_t number) const {
  return std::any_of(intervals_.begin(), intervals_.end(),
                     [number](const Interval& interval) { return interval.number == number; });
}

ChangeLog::Interval ChangeLog::Since(int64_t number) const {
  const auto first =
      std::find_if(intervals_.begin(), intervals_.end(),
                   [number](const Interval& interval) { return interval.number == number; });
  Interval found;
  for (auto interval = first; interval != intervals_.end(); ++interval) {
    found.whole |= interval->whole;
    found.touched.insert(found.touched.end(), interval->touched.begin(), interval->touched.end());
    found.erased.insert(found.erased.end(), interval->erased.begin(), interval->erased.end());
    for (const StepRun& run : interval->steps) Add(run, &found.steps);
  }
  if (found.whole) Shrink(&found);
  return found;
}

int64_t ChangeLog::bytes() const {
  size_t bytes = last_.capacity() * sizeof(uint32_t) + intervals_.capacity() * sizeof(Interval);
  for (const Interval& interval : intervals_) {
    bytes += (interval.touched.capacity() + interval.erased.capacity()) * sizeof(uint64_t) +
             interval.steps.capacity() * sizeof(StepRun);
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace sok
