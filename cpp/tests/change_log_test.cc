// How long a log of steps may become before the next delta holds all keys instead.
#include "cpp/core/cpu/change_log.h"

#include <cstdint>

#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr int64_t kRuns = 5000;

// Steps of different learning rates, as a schedule makes them.
ChangeLog::Interval Logged(int64_t num_rows, int64_t num_steps, bool catches_up) {
  ChangeLog log;
  const int64_t number = log.Begin(num_rows);
  for (int64_t step = 1; step <= num_steps; ++step) {
    if (catches_up) log.CaughtUp();
    log.Step(1.0 / static_cast<double>(step), step);
  }
  return log.Since(number);
}

void TestALongLogOfFewRowsIsDropped() {
  const ChangeLog::Interval few = Logged(100, kRuns, false);
  CHECK(few.whole && few.steps.empty());
  const ChangeLog::Interval many = Logged(8 * kRuns, kRuns, false);
  CHECK(!many.whole && static_cast<int64_t>(many.steps.size()) == kRuns);
  CHECK(!Logged(100, kRuns / 2, false).whole && Logged(100, kRuns / 2, true).whole);
}

void TestStepsOfOneRateAreOneRun() {
  ChangeLog log;
  const int64_t number = log.Begin(1);
  for (int64_t step = 1; step <= 10 * kRuns; ++step) log.Step(0.1, step);
  const ChangeLog::Interval found = log.Since(number);
  CHECK(!found.whole && found.steps.size() == 1 && found.steps[0].count == 10 * kRuns);
}

void TestTheNextIntervalBeginsAnew() {
  ChangeLog log;
  const int64_t first = log.Begin(1);
  for (int64_t step = 1; step <= kRuns; ++step) log.Step(1.0 / static_cast<double>(step), step);
  const int64_t second = log.Begin(1);
  log.Step(0.5, kRuns + 1);
  CHECK(log.Since(first).whole);
  CHECK(!log.Since(second).whole && log.Since(second).steps.size() == 1);
}

// The reader of a whole table would list them beside all keys, and replay the steps twice.
void TestAWholeIntervalLeavesNoKeysOfOthers() {
  for (const bool is_first : {true, false}) {
    ChangeLog log;
    const int64_t first = log.Begin(4);
    const uint64_t keys[] = {3, 1};
    const uint32_t rows[] = {0, 1};
    if (is_first) log.TouchAll();
    log.Touch(keys, rows, 2);
    log.Erase(3, 0);
    log.Step(0.1, 1);
    log.Begin(4);
    if (!is_first) log.TouchAll();
    log.Touch(keys, rows, 2);
    log.Step(0.1, 2);
    const ChangeLog::Interval found = log.Since(first);
    CHECK(found.whole && found.touched.empty() && found.erased.empty() && found.steps.empty());
  }
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestALongLogOfFewRowsIsDropped();
  sok::TestStepsOfOneRateAreOneRun();
  sok::TestTheNextIntervalBeginsAnew();
  sok::TestAWholeIntervalLeavesNoKeysOfOthers();
}
