// How long a dump rests beside training. Times have lower bounds only, or very wide ones.
#include "cpp/core/cpu/pace.h"

#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr double kWork = 0.05;

double Now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Of this thread: it also sleeps where it waits for a lock, not where it waits for a core.
int64_t NumSleeps() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

void Work() {
  for (const double end = Now(CLOCK_THREAD_CPUTIME_ID) + kWork;
       Now(CLOCK_THREAD_CPUTIME_ID) < end;) {
  }
}

// The rest after some work; a first call has begun to measure.
template <typename Fn>
double RestOf(double share, const Fn& demand, Pace* pace = nullptr) {
  Pace own(share);
  if (pace == nullptr) pace = &own;
  pace->Rest(demand);
  Work();
  return pace->Rest(demand);
}

void TestShare() {
  int64_t changes = 5;
  const auto training = [&] { return Demand{++changes, 0.0}; };
  const double begin = Now();
  RestOf(0.25, training);
  CHECK(Now() - begin >= kWork / 0.25 - 0.002);
  CHECK(Pace::ShareOfMachine() > 0.0 && Pace::ShareOfMachine() <= 1.0);
}

void TestNoTraining() {
  CHECK(RestOf(0.001, [] { return Demand{5, 0.0}; }) == 0.0);
  int64_t changes = 0;  // it ends while the reader rests
  const double begin = Now();
  CHECK(RestOf(0.001, [&] { return Demand{changes = std::min<int64_t>(changes + 1, 2), 0.0}; }) >
        0);
  CHECK(Now() - begin >= 0.9 && Now() - begin < 20.0);
}

void TestCopiesThatWait() {
  int64_t changes = 0;
  CHECK(RestOf(0.001, [&] { return Demand{++changes, 1.0}; }) == 0.0);
  const double begin = Now();  // 0.2 s for the half between a tenth and all: about 0.55
  RestOf(0.1, [&] { return Demand{++changes, 0.6875}; });
  CHECK(Now() - begin >= kWork / 0.56);
  const double later = Now();  // they come while the reader rests: else 50 s
  RestOf(0.001, [&] { return Demand{++changes, Now() - later < 0.2 ? 0.0 : 1.0}; });
  CHECK(Now() - later < 20.0);
}

void TestHurry() {
  int64_t changes = 0;
  Pace pace(0.001);
  const double begin = Now();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    pace.Hurry();
  });
  const auto training = [&] { return Demand{++changes, 0.0}; };
  RestOf(0.0, training, &pace);
  other.join();
  CHECK(Now() - begin < 20.0);  // else 50
  CHECK(RestOf(0.0, training, &pace) == 0.0);
}

// How often a thread that reads a table has slept. Another table of the same training changes all the
// time, so that the reader waits for no lock.
int64_t RestsOfReader(bool hurries) {
  constexpr int64_t kDim = 256, kKeys = 40'000, kPart = 8000;
  InlineExecutor ex;
  TableOptions options;
  options.name = "read";
  options.dim = kDim;
  CpuTable table(options), other(options);
  std::vector<uint64_t> keys(kKeys);
  std::iota(keys.begin(), keys.end(), uint64_t{0});
  std::vector<float> rows(kKeys * kDim, 1.0f);
  table.Assign(ex, keys.data(), kKeys, rows.data());
  other.Assign(ex, keys.data(), 64, rows.data());
  const std::unique_ptr<TableReader> reader = table.OpenChanges(ex, 0, true);
  const std::unique_ptr<TableReader> of_other = other.OpenChanges(ex, 0, true);
  std::atomic<bool> ends{false};
  std::atomic<int64_t> count{0};
  std::thread training([&] {
    InlineExecutor own;
    const std::vector<float> some(64 * kDim, 2.0f);
    for (; !ends; ++count) other.Assign(own, keys.data(), 64, some.data());
  });
  if (hurries) reader->Hurry();
  std::vector<uint64_t> part(kPart);
  int64_t rests = 0;
  for (int64_t first = 0; first < kKeys; first += kPart) {
    const int64_t before = count;
    while (count == before) std::this_thread::yield();
    const int64_t begin = NumSleeps();
    reader->ReadKeys(ex, kPart, part.data());
    reader->ReadRows(ex, first, part.data(), kPart, rows.data(), nullptr, nullptr);
    rests += NumSleeps() - begin;
  }
  ends = true;
  training.join();
  return rests;
}

// A reader beside training leaves it time, until it must hurry.
void TestReader() {
  if (Pace::ShareOfMachine() > 0.4) return;  // too few rests to count
  const int64_t at_its_pace = RestsOfReader(false), in_a_hurry = RestsOfReader(true);
  std::fprintf(stderr, "rests: %d at its pace, %d in a hurry\n", static_cast<int>(at_its_pace),
               static_cast<int>(in_a_hurry));
  CHECK(at_its_pace >= 3 && in_a_hurry * 2 < at_its_pace);
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestShare();
  sok::TestNoTraining();
  sok::TestCopiesThatWait();
  sok::TestHurry();
  sok::TestReader();
}
