// How long a dump rests beside training. Times have lower bounds only, or very wide ones.
#include "cpp/core/cpu/pace.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
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

// A reader beside training leaves it time, until it must hurry.
void TestReader() {
  constexpr int64_t kDim = 256, kKeys = 40'000, kPart = 8000;
  InlineExecutor ex;
  TableOptions options;
  options.name = "read";
  options.dim = kDim;
  CpuTable table(options);
  std::vector<uint64_t> keys(kKeys);
  for (int64_t i = 0; i < kKeys; ++i) keys[static_cast<size_t>(i)] = static_cast<uint64_t>(i);
  std::vector<float> rows(kKeys * kDim, 1.0f);
  table.Assign(ex, keys.data(), kKeys, rows.data());
  for (const bool hurries : {false, true}) {
    const std::unique_ptr<TableReader> reader = table.OpenChanges(ex, 0, true);
    std::atomic<bool> ends{false};
    std::atomic<int64_t> count{0};
    std::thread training([&] {
      InlineExecutor own;
      const std::vector<float> some(64 * kDim, 2.0f);
      for (; !ends; ++count) table.Assign(own, keys.data(), 64, some.data());
    });
    while (count < 3) std::this_thread::yield();
    if (hurries) reader->Hurry();
    std::vector<uint64_t> part(kPart);
    double taken = 0.0, used = 0.0;
    for (int64_t first = 0; first < kKeys; first += kPart) {
      const double cpu = Now(CLOCK_THREAD_CPUTIME_ID), time = Now();
      reader->ReadKeys(ex, kPart, part.data());
      reader->ReadRows(ex, first, part.data(), kPart, rows.data(), nullptr, nullptr);
      used += Now(CLOCK_THREAD_CPUTIME_ID) - cpu;
      taken += Now() - time;
      const int64_t before = count;
      while (count == before) std::this_thread::yield();
    }
    ends = true;
    training.join();
    std::fprintf(stderr, "%s: %.3f s of processor time in %.3f s\n",
                 hurries ? "in a hurry" : "at its pace", used, taken);
    // The work before the first change that it sees is done without a rest.
    if (!hurries) CHECK(taken >= 0.5 * used / Pace::ShareOfMachine());
  }
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
