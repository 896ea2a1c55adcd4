// What an optimizer keeps with a table, beside the slot rows: its options, the history of steps,
// and the means to bring an idle row up to the present.
//
// Attached to the table as its RowCatchUp by the first ApplyGradients. For rules that touch the
// rows of the batch only it is never pending and costs nothing.
//
// Threads: everything but Append and Rebase may run at once on different rows; the table's lock
// keeps those two apart from all else.
#ifndef SOK_CORE_CPU_OPTIMIZER_STATE_H_
#define SOK_CORE_CPU_OPTIMIZER_STATE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/adam_replay.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/optimizer.h"

namespace sok {

class OptimizerState final : public RowCatchUp {
 public:
  OptimizerState(const OptimizerOptions& options, int64_t dim);

  const OptimizerOptions& options() const { return options_; }
  StepHistory& history() { return history_; }
  const StepHistory& history() const { return history_; }
  bool owes() const { return history_.kind() != ReplayKind::kNothing; }
  int64_t row_floats() const { return row_floats_; }  // [dim | slot rows]

  std::string ToString() const override { return options_.ToString(9); }
  bool pending() const override { return owes() && !history_.empty(); }
  void Apply(float* row) const override;
  void Read(const float* row, float* embedding) const override;
  void Rebase() override { history_.Forget(); }
  int64_t bytes() const override {
    return history_.bytes() + static_cast<int64_t>(seen_.capacity() * sizeof(uint64_t));
  }
  double Decay() const override { return history_.decay(); }

  // Step numbers are stored as bits: a float counts to 2^24 only.
  uint32_t LastStep(const float* row) const {
    uint32_t last_step;
    std::memcpy(&last_step, row + last_step_offset_, sizeof(last_step));
    return last_step;
  }
  void SetLastStep(float* row, uint32_t last_step) const {
    std::memcpy(row + last_step_offset_, &last_step, sizeof(last_step));
  }

  // True if a row number occurs twice. Not thread-safe: it keeps one bit per row between calls.
  bool HasDuplicates(const uint32_t* row_numbers, int64_t num_keys);

 private:
  // Writes the embedding as of now; `row` is left alone.
  void Replay(const float* row, const StepHistory::Factors& factors, float* embedding) const;
  void ReplaySteps(const float* row, float* embedding) const;

  const OptimizerOptions options_;
  const int64_t dim_;
  const double beta_1_, beta_2_;  // as written: to find that takes a microsecond
  StepHistory history_;
  int64_t row_floats_ = 0;
  int64_t last_step_offset_ = 0;
  std::vector<uint64_t> seen_;  // one bit per row number, all zero between calls
};

}  // namespace sok

#endif  // SOK_CORE_CPU_OPTIMIZER_STATE_H_
