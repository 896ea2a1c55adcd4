#include "cpp/core/slots.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <utility>

#include "cpp/core/adam_replay.h"

namespace sok {
namespace {

std::map<std::string, int64_t> SavedWidths(const std::vector<SlotVariableSpec>& slots) {
  std::map<std::string, int64_t> widths;
  for (const SlotVariableSpec& slot : slots) {
    if (slot.saved) widths.emplace(slot.name, slot.width);
  }
  return widths;
}

// The rules that have these slots: "adam or lazy_adam"; of none, the slots.
std::string RulesWith(const std::vector<SlotVariableSpec>& slots, int64_t dim) {
  const std::map<std::string, int64_t> widths = SavedWidths(slots);
  std::string rules, names;
  for (int kind = 0; kind < kNumOptimizerKinds; ++kind) {
    OptimizerOptions options;
    options.kind = static_cast<OptimizerKind>(kind);
    options.amsgrad = widths.count("velocity_hat") > 0;
    options.momentum_before_rate = widths.count("accumulation") > 0;
    if (SavedWidths(OptimizerSlots(options, dim)) != widths) continue;
    rules += (rules.empty() ? "" : " or ") + OptimizerName(options.kind);
    if (options.amsgrad) rules += " with amsgrad";
  }
  for (const auto& [name, width] : widths) names += (names.empty() ? "" : ", ") + name;
  return !rules.empty() ? rules : "a rule with slot variables " + names;
}

}  // namespace

std::vector<SlotVariableSpec> OptimizerSlots(const OptimizerOptions& options, int64_t dim) {
  const float initial = options.initial_accumulator;
  std::vector<SlotVariableSpec> slots;
  switch (options.kind) {
    case OptimizerKind::kSgd:
      break;
    case OptimizerKind::kMomentum:
      // The first is a sum of gradients, the second of steps.
      slots = {{options.momentum_before_rate ? "accumulation" : "momentum", dim, 0.0f, true}};
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
    case OptimizerKind::kAdagradDecay:
      slots = {{"accumulator", dim, initial, true}, {"decays", dim, 0.0f, true}};
      break;
    case OptimizerKind::kRmsprop:
      slots = {{"momentum", dim, 0.0f, true}, {"mean_square", dim, 0.0f, true}};
      break;
    case OptimizerKind::kFtrl:
      slots = {{"accumulator", dim, initial, true}, {"linear", dim, 0.0f, true}};
      break;
  }
  if (ReplayKindOf(options) != ReplayKind::kNothing) slots.push_back({"last_step", 1, 0.0f, false});
  return slots;
}

void CheckSlots(const std::vector<SlotVariableSpec>& slots, const std::string& table) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].width < 1) {
      throw std::invalid_argument("The width of slot variable '" + slots[i].name +
                                  "' must be positive. Received: " +
                                  std::to_string(slots[i].width) + " (table '" + table + "')");
    }
    for (size_t j = 0; j < i; ++j) {
      if (slots[i].name == slots[j].name) {
        throw std::invalid_argument("Slot variables must have different names. Received: '" +
                                    slots[i].name + "' twice (table '" + table + "')");
      }
    }
  }
}

bool SameSlots(const std::vector<SlotVariableSpec>& a, const std::vector<SlotVariableSpec>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const SlotVariableSpec& x, const SlotVariableSpec& y) {
                      return x.name == y.name && x.width == y.width && x.initial == y.initial &&
                             x.saved == y.saved;
                    });
}

bool SameSavedSlots(const std::vector<SlotVariableSpec>& a,
                    const std::vector<SlotVariableSpec>& b) {
  const auto saved = [](const std::vector<SlotVariableSpec>& slots) {
    std::vector<std::pair<std::string, int64_t>> found;
    for (const SlotVariableSpec& slot : slots) {
      if (slot.saved) found.emplace_back(slot.name, slot.width);
    }
    return found;
  };
  return saved(a) == saved(b);
}

bool IsOfAnotherRule(const std::vector<SlotVariableSpec>& held, int64_t step,
                     const std::vector<SlotVariableSpec>& wanted) {
  const std::map<std::string, int64_t> widths = SavedWidths(held);
  return (step > 0 || !widths.empty()) && widths != SavedWidths(wanted);
}

void SayThatStateStartsAnew(const std::vector<SlotVariableSpec>& held, int64_t step,
                            const OptimizerOptions& options, int64_t dim,
                            const std::string& table) {
  const std::string steps = step < 0 ? "" : " after " + std::to_string(step) + " steps";
  std::fprintf(stderr,
               "sok_like: table '%s' holds what %s left%s, and is now trained by %s. It keeps its "
               "rows; the optimizer's slot variables and step count start anew.\n",
               table.c_str(), RulesWith(held, dim).c_str(), steps.c_str(),
               options.ToString().c_str());
}

int64_t OffsetOfSlot(const std::vector<SlotVariableSpec>& slots, int64_t dim,
                     const std::string& name, int64_t width) {
  int64_t offset = dim;
  for (const SlotVariableSpec& slot : slots) {
    if (slot.name == name) return width < 0 || slot.width == width ? offset : -1;
    offset += slot.width;
  }
  return -1;
}

std::vector<KeptSlot> KeptSlots(const std::vector<SlotVariableSpec>& old_slots,
                                const std::vector<SlotVariableSpec>& new_slots, int64_t dim) {
  std::vector<KeptSlot> kept;
  for (const SlotVariableSpec& slot : new_slots) {
    const bool may_be_unknown =
        std::any_of(old_slots.begin(), old_slots.end(), [&slot](const SlotVariableSpec& old) {
          return old.name == slot.name && std::isnan(old.initial);
        });
    kept.push_back({OffsetOfSlot(old_slots, dim, slot.name, slot.width), may_be_unknown});
  }
  return kept;
}

void CopySavedSlots(const std::vector<SlotVariableSpec>& slots, const float* slot_rows,
                    float* saved) {
  for (const SlotVariableSpec& spec : slots) {
    if (spec.saved) saved = std::copy_n(slot_rows, spec.width, saved);
    slot_rows += spec.width;
  }
}

}  // namespace sok
