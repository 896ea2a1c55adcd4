// ChangeLog: which keys of a table were touched or erased since its last dumps.
//
//     dump 1        dump 2        dump 3        now
//       |  interval   |  interval   |  interval  |        changes since dump 2: the last two
//
//     row number r -> last_[r]   the interval in which the row was touched last      4 bytes
//     interval        the keys that were touched in it, each once                    8 bytes per key
//                     the keys that lost their row
//                     the optimizer's steps, where those move rows outside of the batch
//
// A row is marked by the batch that touches it, so to list the changes costs by the keys touched,
// not by the table's size. A table makes a log when the first delta may follow, and pays nothing
// before.
//
// A log never fails. Where memory is short, or more keys changed than the table holds, the interval
// is `whole`: the next delta holds all keys. Old intervals are dropped when they hold more than the
// table does.
//
// Not thread-safe: the table's exclusive lock covers it.
#ifndef SOK_CORE_CPU_CHANGE_LOG_H_
#define SOK_CORE_CPU_CHANGE_LOG_H_

#include <cstdint>
#include <vector>

#include "cpp/core/changes.h"

namespace sok {

class ChangeLog {
 public:
  struct Interval {
    int64_t number = 0;
    uint32_t mark = 0;  // in last_
    bool whole = false;
    std::vector<uint64_t> touched, erased;
    std::vector<StepRun> steps;
  };

  // Begins an interval of a table that has given out so many rows. Returns its number, which is
  // unique in the process. Throws std::bad_alloc.
  int64_t Begin(int64_t num_rows);

  // Rows of the keys have other bits than before, or records. A row number of kNoRow is passed over.
  void Touch(const uint64_t* keys, const uint32_t* rows, int64_t num_keys) noexcept;
  void Erase(uint64_t key, uint32_t row) noexcept;
  // More than keys has changed: the layout of slots, or everything.
  void TouchAll() noexcept;
  void Step(double learning_rate, int64_t step) noexcept;
  void CaughtUp() noexcept;
  bool has_steps() const;

  bool Has(int64_t number) const;
  // Keys and steps since an interval began, which there is; keys ascending and each once. They may
  // have been erased, or inserted again, since.
  Interval Since(int64_t number) const;

  int64_t bytes() const;

 private:
  void Shrink(Interval* interval) noexcept;
  bool TooMany(const Interval& interval) const;
  void Grow(size_t num_rows);

  std::vector<uint32_t> last_;  // by row number
  std::vector<Interval> intervals_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_CHANGE_LOG_H_
