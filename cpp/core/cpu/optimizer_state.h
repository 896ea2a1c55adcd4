// OptimizerState: what an optimizer keeps with a table besides the slot rows, namely its options
// and the history of steps. It brings idle rows up to date.
//
// The first ApplyGradients attaches it to the table as its RowCatchUp. For rules that change only
// the rows of the batch it is never pending and costs nothing.
//
// Threads: calls on different rows may run concurrently. The table's exclusive lock separates
// Append, Rebase and HasDuplicates from all others.
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

  // Step numbers are stored as the bits of a uint32: a float counts to 2^24 only.
  uint32_t LastStep(const float* row) const {
    uint32_t last_step;
    std::memcpy(&last_step, row + last_step_offset_, sizeof(last_step));
    return last_step;
  }
  void SetLastStep(float* row, uint32_t last_step) const {
    std::memcpy(row + last_step_offset_, &last_step, sizeof(last_step));
  }

  // True if a row number occurs twice. Not thread-safe: it uses seen_.
  bool HasDuplicates(const uint32_t* row_numbers, int64_t num_keys);

 private:
  // Writes the up-to-date embedding, which may be at `row`; changes nothing else.
  void Replay(const float* row, const StepHistory::Factors& factors, float* embedding) const;
  void ReplaySteps(const float* row, float* embedding) const;

  const OptimizerOptions options_;
  const int64_t dim_;
  const double beta_1_, beta_2_;  // AsWritten, which takes a microsecond
  StepHistory history_;
  int64_t row_floats_ = 0;
  int64_t last_step_offset_ = 0;
  std::vector<uint64_t> seen_;  // one bit per row number, all zero between calls
};

}  // namespace sok

#endif  // SOK_CORE_CPU_OPTIMIZER_STATE_H_
