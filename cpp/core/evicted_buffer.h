// EvictedBuffer: the last evicted rows, in host memory, until they are popped.
//
//     oldest | record | row, dim | saved slot rows | ... newest     slots: `names`, `widths`
//
// Invariant: all slot rows have the same slots. When an optimizer changes the table's slots, the
// buffered rows are converted: slots of equal name and width stay, others get their initial value.
#ifndef SOK_CORE_EVICTED_BUFFER_H_
#define SOK_CORE_EVICTED_BUFFER_H_

#include <cstdint>
#include <list>
#include <string>
#include <vector>

#include "cpp/core/key_records.h"
#include "cpp/core/slots.h"

namespace sok {

struct EvictedRow {
  KeyRecord record;
  std::vector<float> row;       // [dim]
  std::vector<float> slot_row;  // [sum of saved slot widths]
};

class EvictedBuffer {
 public:
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }

  // Converts the rows to these slots. Throws std::bad_alloc before anything has changed.
  void SetSlots(const std::vector<SlotVariableSpec>& slots);
  // Allocates `count` rows for the caller to fill and to append.
  std::list<EvictedRow> MakeRows(int64_t count, int64_t dim) const;
  // Keeps only the last `most` rows; returns the number of rows dropped.
  int64_t Append(std::list<EvictedRow> rows, int64_t most) noexcept;
  // Removes and returns all rows, oldest first.
  EvictedRows Pop();
  // Drops the rows of these keys, which are in host memory; returns how many. Throws
  // std::bad_alloc before anything has changed.
  int64_t Forget(const uint64_t* keys, int64_t num_keys);
  void Clear() { rows_.clear(); }

 private:
  std::list<EvictedRow> rows_;  // of which Append takes others over without allocating
  std::vector<std::string> names_;
  std::vector<int64_t> widths_;
};

}  // namespace sok

#endif  // SOK_CORE_EVICTED_BUFFER_H_
