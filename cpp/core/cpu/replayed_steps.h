// ReplayedSteps: brings rows of a dump up to date through the steps that later deltas logged.
//
//     base | segment 1 | delta 1 | segment 2 | delta 2          a segment: the StepRuns of a delta
//      rows of the base ........................... owe both segments
//                        rows of delta 1 .......... owe segment 2
//
// If an optimizer moves rows outside of the batch, a row that no later delta holds owes steps since
// its own dump. The live table applies them in one go when the row is next read. This class does
// the same with the same OptimizerState and the same gaps, therefore the bits are the same. A run
// with count 0 splits a gap in two, as it did in the live table.
#ifndef SOK_CORE_CPU_REPLAYED_STEPS_H_
#define SOK_CORE_CPU_REPLAYED_STEPS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/cpu/optimizer_state.h"

namespace sok {

class ReplayedSteps {
 public:
  struct Segment {
    OptimizerOptions options;
    std::vector<StepRun> steps;
  };

  // The slots are those that lie side by side in slot rows. Throws std::invalid_argument if an
  // optimizer needs another one, or if no table can have made a step.
  ReplayedSteps(int64_t dim, const std::vector<std::string>& slot_names,
                const std::vector<int64_t>& slot_widths, const std::vector<Segment>& segments);

  // Brings up rows of dump number `dump`; 0 is the base.
  void BringUp(Executor& ex, int64_t dump, int64_t num_rows, float* rows,  // [num_rows, dim]
               float* slot_rows) const;  // [num_rows, sum of slot widths]

 private:
  // Steps between two instants at which no row owes anything.
  struct Epoch {
    std::unique_ptr<OptimizerState> state;
    std::vector<std::pair<int64_t, int64_t>> slots;  // of the state: offset in slot rows, width
  };
  void BeginEpoch(const OptimizerOptions& options);
  void Append(const Segment& segment);

  int64_t dim_, slot_width_ = 0;
  std::vector<std::string> slot_names_;
  std::vector<int64_t> slot_widths_;
  std::vector<Epoch> epochs_;
  std::unique_ptr<const OptimizerState> pristine_;  // with the options of the last epoch
  // For each dump: its epoch, and the number of steps of that epoch that its rows contain.
  std::vector<std::pair<size_t, uint32_t>> starts_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_REPLAYED_STEPS_H_
