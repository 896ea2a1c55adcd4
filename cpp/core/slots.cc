#include "cpp/core/slots.h"

#include <stdexcept>

#include "cpp/core/adam_replay.h"

namespace sok {

std::vector<SlotSpec> OptimizerSlots(const OptimizerOptions& options, int64_t dim) {
  const float initial = options.initial_accumulator;
  std::vector<SlotSpec> slots;
  switch (options.kind) {
    case OptimizerKind::kSgd:
      break;
    case OptimizerKind::kMomentum:
      slots = {{"momentum", dim, 0.0f, true}};
      break;
    case OptimizerKind::kAdagrad:
      slots = {{"accumulator", dim, initial, true}};
      break;
    case OptimizerKind::kRowWiseAdagrad:
      slots = {{"accumulator", 1, initial, true}};
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kLazyAdam:
      slots = {{"momentum", dim, 0.0f, true}, {"velocity", dim, 0.0f, true}};
      if (options.amsgrad) slots.push_back({"velocity_hat", dim, 0.0f, true});
      break;
    case OptimizerKind::kFtrl:
      slots = {{"accumulator", dim, initial, true}, {"linear", dim, 0.0f, true}};
      break;
  }
  if (ReplayKindOf(options) != ReplayKind::kNothing) slots.push_back({"last_step", 1, 0.0f, false});
  return slots;
}

void CheckSlotWidths(const std::vector<SlotSpec>& present, const OptimizerOptions& options,
                     int64_t dim, const std::string& table) {
  for (const SlotSpec& wanted : OptimizerSlots(options, dim)) {
    for (const SlotSpec& held : present) {
      if (held.name != wanted.name || held.width == wanted.width) continue;
      throw std::invalid_argument("Slot variable '" + wanted.name + "' of " + options.ToString() +
                                  " must be " + std::to_string(wanted.width) +
                                  " floats wide. Table '" + table + "' holds one of " +
                                  std::to_string(held.width));
    }
  }
}

}  // namespace sok
