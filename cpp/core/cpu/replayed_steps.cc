#include "cpp/core/cpu/replayed_steps.h"

#include <algorithm>
#include <stdexcept>

#include "cpp/core/slots.h"

namespace sok {

ReplayedSteps::ReplayedSteps(int64_t dim, const std::vector<std::string>& slot_names,
                             const std::vector<int64_t>& slot_widths,
                             const std::vector<Segment>& segments)
    : dim_(dim), slot_names_(slot_names), slot_widths_(slot_widths) {
  for (int64_t width : slot_widths_) slot_width_ += width;
  starts_.emplace_back(0, 0);
  for (const Segment& segment : segments) {
    Append(segment);
    const bool none = epochs_.empty();
    starts_.emplace_back(none ? 0 : epochs_.size() - 1,
                         none ? 0 : epochs_.back().state->history().num_steps());
  }
}

void ReplayedSteps::BeginEpoch(const OptimizerOptions& options) {
  options.Validate();
  Epoch epoch;
  // Its tables take a third of a millisecond to compute, and a log may have thousands of epochs.
  if (pristine_ == nullptr || pristine_->options() != options) {
    pristine_ = std::make_unique<OptimizerState>(options, dim_);
  }
  epoch.state = std::make_unique<OptimizerState>(*pristine_);
  for (const SlotVariableSpec& slot : OptimizerSlots(options, dim_)) {
    if (!slot.saved) continue;
    int64_t offset = 0;
    size_t at = 0;
    while (at < slot_names_.size() && slot_names_[at] != slot.name) offset += slot_widths_[at++];
    if (at == slot_names_.size() || slot_widths_[at] != slot.width) {
      throw std::invalid_argument("The steps of " + options.ToString() + " need slot variable '" +
                                  slot.name + "', " + std::to_string(slot.width) +
                                  " floats wide. Received: a dump without it");
    }
    epoch.slots.emplace_back(offset, slot.width);
  }
  epochs_.push_back(std::move(epoch));
}

void ReplayedSteps::Append(const Segment& segment) {
  for (const StepRun& run : segment.steps) {
    if (run.count == 0) {
      // Ends the epoch if it has steps; an empty epoch continues.
      if (!epochs_.empty() && !epochs_.back().state->history().empty()) {
        BeginEpoch(segment.options);
      }
      continue;
    }
    if (run.count < 0 || run.count >= (int64_t{1} << 31) || run.step < 1) {
      throw std::invalid_argument(
          "A run of steps must have a count in [1, 2^31) and a first step of at least 1. "
          "Received: count " +
          std::to_string(run.count) + ", first step " + std::to_string(run.step));
    }
    if (epochs_.empty()) {
      BeginEpoch(segment.options);
    } else if (epochs_.back().state->options() != segment.options) {
      if (epochs_.back().state->history().empty()) epochs_.pop_back();
      BeginEpoch(segment.options);
    }
    StepHistory& history = epochs_.back().state->history();
    for (int64_t i = 0; i < run.count; ++i) history.Append(run.learning_rate, run.step + i);
  }
}

void ReplayedSteps::BringUp(Executor& ex, int64_t dump, int64_t num_rows, float* rows,
                            float* slot_rows) const {
  const auto [first, behind] = starts_.at(static_cast<size_t>(dump));
  if (first >= epochs_.size()) return;
  ex.ParallelFor(num_rows, 512, [&, first = first, behind = behind](int64_t begin, int64_t end) {
    std::vector<float> row;
    for (int64_t r = begin; r < end; ++r) {
      float* const out = rows + r * dim_;
      float* const slots = slot_rows + r * slot_width_;
      for (size_t e = first; e < epochs_.size(); ++e) {
        const OptimizerState& state = *epochs_[e].state;
        if (!state.pending()) continue;
        row.resize(static_cast<size_t>(state.row_floats()));
        float* at = std::copy_n(out, dim_, row.data());
        for (const auto& [offset, width] : epochs_[e].slots) {
          at = std::copy_n(slots + offset, width, at);
        }
        state.SetLastStep(row.data(), e == first ? behind : 0);
        state.Apply(row.data());
        std::copy_n(row.data(), dim_, out);
        at = row.data() + dim_;
        for (const auto& [offset, width] : epochs_[e].slots) {
          std::copy_n(at, width, slots + offset);
          at += width;
        }
      }
    }
  });
}

}  // namespace sok
