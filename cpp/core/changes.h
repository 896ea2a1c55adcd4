// What changed in a table between two dumps: plain data, the same on every device.
#ifndef SOK_CORE_CHANGES_H_
#define SOK_CORE_CHANGES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/table.h"

namespace sok {

// Consecutive steps of an optimizer that moves rows which are not in the batch (adam_replay.h).
struct StepRun {
  int64_t count = 0;  // 0: here every row was brought up to date, and rows owe nothing
  double learning_rate = 0.0;
  int64_t step = 0;  // the table's number of the first one
};

struct TableChanges {
  TableSnapshot snapshot;        // the keys touched, or where `whole` all keys
  std::vector<uint64_t> erased;  // ascending; keys that have no row any more
  bool whole = false;            // what the table held before is replaced
  // What moves the rows that were not touched, and its options (OptimizerOptions::ToString of 9
  // digits); empty where rows outside of a batch stay.
  std::vector<StepRun> steps;
  std::string optimizer;
  int64_t number = 0;  // by which changes since this instant are asked for
};

}  // namespace sok

#endif  // SOK_CORE_CHANGES_H_
