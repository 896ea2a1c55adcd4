#include "cpp/core/cpu/pace.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace sok {
namespace {

constexpr double kOfAllCores = 0.1;
constexpr double kQuiet = 1.0;    // seconds without a change, after which training rests
constexpr double kLeast = 0.001;  // seconds of a rest; less adds up
constexpr double kMost = 0.01;    // seconds until it looks again
constexpr double kRises = 0.5, kFull = 0.875;  // crowding from which it takes more, and all

double Seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

double Pace::ShareOfMachine() {
  return std::min(1.0, std::max(1u, std::thread::hardware_concurrency()) * kOfAllCores);
}

double Pace::Left(const Demand& demand) {
  const double cpu = Seconds(CLOCK_THREAD_CPUTIME_ID), time = Seconds(CLOCK_MONOTONIC);
  // Where cores are short, waiting for one is no rest: after a sleep the thread is not interrupted
  // at once, while it holds a lock.
  if (!began_ || demand.changes != changes_) changed_ = began_ ? time : time - kQuiet;
  began_ = true;
  changes_ = demand.changes;
  const double more = std::clamp((demand.crowding - kRises) / (kFull - kRises), 0.0, 1.0);
  const double share = share_ + (1.0 - share_) * more;
  double left = 0.0;
  if (!hurried_ && time - changed_ < kQuiet) left = (cpu - cpu_) * (1.0 / share - 1.0) - slept_;
  if (left >= kLeast) return std::min(left, kMost);
  if (left <= 0.0) {
    cpu_ = cpu;
    slept_ = 0.0;
  }
  return 0.0;
}

void Pace::Sleep(double seconds) {
  slept_ += seconds;
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace sok
