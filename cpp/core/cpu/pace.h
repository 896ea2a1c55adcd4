// Pace: how much of a core the reader of a dump takes beside training.
//
//     the tables change           a tenth of the machine's cores, at most one core
//     many copies wait as well    more, up to a whole core: training need not wait for room (instant.h)
//     no change for a second      as much as it can get, as after Hurry
//
// The reader rests between two pieces of work, while it holds no lock. A lower priority would take as
// little: but a thread that waits for a core while it holds the table's lock, or Python's, lets
// training wait as long.
#ifndef SOK_CORE_CPU_PACE_H_
#define SOK_CORE_CPU_PACE_H_

#include <atomic>
#include <cstdint>

namespace sok {

// What readers see of the tables that are dumped.
struct Demand {
  int64_t changes = 0;    // how many calls have changed them
  double crowding = 0.0;  // copies that wait for a reader, as a part of those that may wait
};

class Pace {
 public:
  // The share of a core while tables change and no copies wait.
  explicit Pace(double share = ShareOfMachine()) : share_(share) {}
  static double ShareOfMachine();

  // Called by one thread. Sleeps for what its work since the last call has used too much; returns
  // the seconds that it has slept. `demand` is called again while it sleeps.
  template <typename Fn>
  double Rest(const Fn& demand) {
    double slept = 0.0;
    for (double left; (left = Left(demand())) > 0.0; slept += left) Sleep(left);
    return slept;
  }
  // No rest any more. Of any thread.
  void Hurry() { hurried_ = true; }

 private:
  double Left(const Demand& demand);
  void Sleep(double seconds);

  const double share_;
  std::atomic<bool> hurried_{false};
  bool began_ = false;
  double cpu_ = 0.0;    // of the thread, when the present piece of work began, in seconds
  double slept_ = 0.0;  // since then
  int64_t changes_ = 0;
  double changed_ = 0.0;  // the time of the last change
};

}  // namespace sok

#endif  // SOK_CORE_CPU_PACE_H_
