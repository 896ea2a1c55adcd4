// History: the steps of a table's optimizer, with the records by which rows are brought up to date
// in device memory.
//
// The same records as StepHistory (adam_replay.h), which the host also keeps for its shape and its
// sums of logarithms. A step appends one summand to the records that still grow, in a kernel with
// the CPU's double arithmetic. The CPU keeps a ring and computes older records from runs. Here one
// kernel brings all rows up when the records are full (every kMaxSteps steps), and the history
// starts anew: this sweep takes less than a thousandth of the time of so many steps.
//
// If steps are replayed one at a time (ReplayKind::kAdamSteps) there are no terms to grow: a record
// holds the constants of a step, and the sweep replays up to kMaxSteps per element.
#ifndef SOK_CORE_CUDA_ROWS_HISTORY_H_
#define SOK_CORE_CUDA_ROWS_HISTORY_H_

#include <cstdint>
#include <vector>

#include "cpp/core/adam_replay.h"
#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/rows/table_ref.h"
#include "cpp/core/optimizer.h"

namespace sok {
namespace cuda {

struct AppendJob;

class History {
 public:
  static constexpr int64_t kMaxSteps = 4096;

  // Async.
  History(const OptimizerOptions& options, Stream stream, int64_t max_steps = kMaxSteps);

  const OptimizerOptions& options() const { return options_; }
  bool owes() const { return steps_.kind() != ReplayKind::kNothing; }
  bool pending() const { return owes() && now_ > 0; }
  bool full() const { return now_ + 1 >= max_steps_; }
  uint32_t num_steps() const { return steps_.num_steps(); }
  double decay() const { return steps_.decay(); }  // see StepHistory
  HistoryRef Ref() const;

  void Reserve() { steps_.Reserve(); }  // for one step, on the host
  // Async. Appends one step of tables that make it together.
  static void Append(Stream stream, const std::vector<History*>& histories, float learning_rate,
                     int64_t step);
  void Forget(Stream stream);  // async; every row must be up to date
  void MoveTo(Stream stream);  // see Buffer

 private:
  AppendJob NextStep(float learning_rate, int64_t step);

  const OptimizerOptions options_;
  const int64_t max_steps_;
  const double beta_1_, beta_2_;  // AsWritten, which takes a microsecond
  StepHistory steps_;
  uint32_t base_ = 0;
  uint32_t now_ = 0;
  Buffer shape_;         // [window, num_terms]
  Buffer terms_;         // [max_steps, num_terms]
  Buffer log_decay_;     // [max_steps]
  Buffer beta_1_power_;  // [max_steps]
  Buffer beta_2_power_;  // [max_steps]
  Buffer alpha_;         // [max_steps], for kAdamSteps
  Buffer decay_;         // [max_steps], for kAdamSteps with weight decay
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_ROWS_HISTORY_H_
