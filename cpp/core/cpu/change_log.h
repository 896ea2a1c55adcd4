// ChangeLog: which keys of a table were touched or erased since its last dumps.
//
//     dump 1        dump 2        dump 3        now
//       |  interval   |  interval   |  interval  |        changes since dump 2: the last two
//
//     row number r -> last_[r]   the interval in which the row was touched last    4 bytes
//     interval        the keys that were touched in it, each once                  8 bytes per key
//                     the keys that lost their row
//                     the optimizer's steps, if they move rows outside of the batch
//
// Each batch marks the rows that it touches, so the cost of listing the changes depends on the
// number of touched keys, not on the table's size. A table has no log, and no cost, until a first
// delta may follow.
//
// Logging never fails. If memory is short, or far more keys changed than the table holds, the
// interval is `whole`: the next delta holds all keys. Old intervals are dropped when they hold more
// keys than the table.
//
// Not thread-safe: callers hold the table's exclusive lock.
#ifndef SOK_CORE_CPU_CHANGE_LOG_H_
#define SOK_CORE_CPU_CHANGE_LOG_H_

#include <cstdint>
#include <vector>

#include "cpp/core/table.h"

namespace sok {

class ChangeLog {
 public:
  struct Interval {
    void Sort();  // touched and erased: ascending, each key once

    int64_t number = 0;
    uint32_t mark = 0;  // its value in last_
    bool whole = false;
    std::vector<uint64_t> touched, erased;
    std::vector<StepRun> steps;
  };

  // Begins an interval; `num_rows` row numbers have been given out. Returns the interval's number,
  // which is unique in the process. Throws std::bad_alloc.
  int64_t Begin(int64_t num_rows);

  // The rows or the records of these keys changed. Skips row numbers of kNoRow.
  void Touch(const uint64_t* keys, const uint32_t* rows, int64_t num_keys) noexcept;
  void Erase(uint64_t key, uint32_t row) noexcept;
  // Not only single keys changed, but the layout of slots or everything.
  void TouchAll() noexcept;
  void Step(double learning_rate, int64_t step) noexcept;
  void CaughtUp() noexcept;
  bool has_steps() const;

  bool Has(int64_t number) const;
  // Keys and steps since an interval began, which must exist. Keys come in any order and may
  // repeat; touched ones may have been erased since, and erased ones inserted again. If one of the
  // intervals was `whole`, there are none.
  Interval Since(int64_t number) const;

  int64_t bytes() const;

 private:
  template <typename Log>
  void Try(const Log& log) noexcept;
  static void Shrink(Interval* interval) noexcept;
  bool TooMany(const Interval& interval) const;
  void Grow(size_t num_rows);

  std::vector<uint32_t> last_;  // by row number
  std::vector<Interval> intervals_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_CHANGE_LOG_H_
