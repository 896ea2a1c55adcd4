// Slot variables: what an optimizer keeps right behind each row, on every device alike.
#ifndef SOK_CORE_SLOTS_H_
#define SOK_CORE_SLOTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/optimizer.h"

namespace sok {

struct SlotVariableSpec {
  std::string name;      // "accumulator", "momentum", "velocity", "last_step", ...
  int64_t width = 0;     // floats per row: dim, or 1 for a per-row scalar
  float initial = 0.0f;  // value in a new row
  // False: derived state that a dump leaves out (a caught-up row has it at `initial`).
  bool saved = true;
};

// Slot variables of a rule, in the order that the rules of optimizer.h count on.
std::vector<SlotVariableSpec> OptimizerSlots(const OptimizerOptions& options, int64_t dim);

// Throws std::invalid_argument where a table holds a slot of that name and another width, which it
// would lose: an imported one.
void CheckSlotWidths(const std::vector<SlotVariableSpec>& present, const OptimizerOptions& options,
                     int64_t dim, const std::string& table);

// Throws std::invalid_argument unless the slots have different names and positive widths.
void CheckSlots(const std::vector<SlotVariableSpec>& slots, const std::string& table);
bool SameSlots(const std::vector<SlotVariableSpec>& a, const std::vector<SlotVariableSpec>& b);
// Whether dumps of both have the same slot rows, by name, width and order.
bool SameSavedSlots(const std::vector<SlotVariableSpec>& a, const std::vector<SlotVariableSpec>& b);
// The floats from a row to its slot of that name, and of that width if one is given; -1 where there
// is none.
int64_t OffsetOfSlot(const std::vector<SlotVariableSpec>& slots, int64_t dim,
                     const std::string& name, int64_t width = -1);
// Where each slot of a new layout comes from in the old one.
struct KeptSlot {
  int64_t offset;       // floats from the old row; -1: the slot starts from its initial value
  bool may_be_unknown;  // so do elements that are NaN: an import left them to the optimizer
};
std::vector<KeptSlot> KeptSlots(const std::vector<SlotVariableSpec>& old_slots,
                                const std::vector<SlotVariableSpec>& new_slots, int64_t dim);

// Copies the saved ones of a row's slot rows, which lie side by side, to `saved`.
void CopySavedSlots(const std::vector<SlotVariableSpec>& slots, const float* slot_rows,
                    float* saved);

}  // namespace sok

#endif  // SOK_CORE_SLOTS_H_
