// ReplayedSteps: rows of a dump, brought up through the steps that later dumps have logged.
//
//     base | segment 1 | delta 1 | segment 2 | delta 2          a segment: the StepRuns of a delta
//      rows of the base ........................... owe both segments
//                        rows of delta 1 .......... owe segment 2
//
// Where an optimizer moves rows outside of the batch, a row that no delta holds has owed steps since
// its own dump. The live table applies them at once when the row is next read, and so does this:
// the same OptimizerState, the same gaps between the same records, therefore the same bits. Records
// of a run with count 0 part a gap in two, as they did in the live table.
#ifndef SOK_CORE_CPU_REPLAYED_STEPS_H_
#define SOK_CORE_CPU_REPLAYED_STEPS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/changes.h"
#include "cpp/core/cpu/optimizer_state.h"

namespace sok {

class ReplayedSteps {
 public:
  struct Segment {
    OptimizerOptions options;
    std::vector<StepRun> steps;
  };

  // The slots are those that lie side by side in slot rows. Throws std::invalid_argument where an
  // optimizer needs another one, or a step could not have been made.
  ReplayedSteps(int64_t dim, const std::vector<std::string>& slot_names,
                const std::vector<int64_t>& slot_widths, const std::vector<Segment>& segments);

  // Rows of dump `dump`; 0 is the base.
  void BringUp(Executor& ex, int64_t dump, int64_t num_rows, float* rows,  // [num_rows, dim]
               float* slot_rows) const;  // [num_rows, sum of slot widths]

 private:
  // Steps between two instants at which no row owes anything.
  struct Epoch {
    std::unique_ptr<OptimizerState> state;
    std::vector<std::pair<int64_t, int64_t>> slots;  // of the state's: offset in slot rows, width
  };
  void BeginEpoch(const OptimizerOptions& options);
  void Append(const Segment& segment);

  int64_t dim_, slot_width_ = 0;
  std::vector<std::string> slot_names_;
  std::vector<int64_t> slot_widths_;
  std::vector<Epoch> epochs_;
  // Of each dump: its epoch, and the steps of that which its rows have behind them.
  std::vector<std::pair<size_t, uint32_t>> starts_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_REPLAYED_STEPS_H_
