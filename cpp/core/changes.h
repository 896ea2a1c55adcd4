// What changed in a table between two dumps: plain data, the same on every device.
#ifndef SOK_CORE_CHANGES_H_
#define SOK_CORE_CHANGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/table.h"

namespace sok {

// Consecutive steps of an optimizer that also moves rows outside the batch (adam_replay.h).
struct StepRun {
  int64_t count = 0;  // 0: at this point every row was brought up to date and owes nothing
  double learning_rate = 0.0;
  int64_t step = 0;  // the table's own number of the first of these steps
};

struct TableChanges {
  TableSnapshot snapshot;        // the keys touched; if `whole`, all keys
  std::vector<uint64_t> erased;  // ascending; keys that no longer have a row
  bool whole = false;            // the snapshot replaces the table's earlier content
  // The steps that move untouched rows and the optimizer that made them (OptimizerOptions::ToString
  // with 9 digits); empty if the optimizer changes only the rows of the batch.
  std::vector<StepRun> steps;
  std::string optimizer;
  int64_t number = 0;  // of this instant, for Table::OpenChanges
};

}  // namespace sok

#endif  // SOK_CORE_CHANGES_H_
