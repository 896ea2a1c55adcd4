// Slot variables: the optimizer state right behind each row, the same on every device.
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
  // False: derived state that dumps leave out; it is `initial` in a row that is up to date.
  bool saved = true;
};

// Slot variables of a rule, in the order that the rules of optimizer.h expect. Rules whose slots have
// the same names and widths can go on from each other's: what another rule means has another name.
std::vector<SlotVariableSpec> OptimizerSlots(const OptimizerOptions& options, int64_t dim);

// Throws std::invalid_argument unless the slots have different names and positive widths.
void CheckSlots(const std::vector<SlotVariableSpec>& slots, const std::string& table);
bool SameSlots(const std::vector<SlotVariableSpec>& a, const std::vector<SlotVariableSpec>& b);
// Whether dumps of both have the same slot rows, by name, width and order.
bool SameSavedSlots(const std::vector<SlotVariableSpec>& a, const std::vector<SlotVariableSpec>& b);
// Whether content with slots `held` and step number `step` (-1: not known) is of a rule whose state
// means nothing to the rule with slots `wanted`: that rule's slots and its steps start anew.
bool IsOfAnotherRule(const std::vector<SlotVariableSpec>& held, int64_t step,
                     const std::vector<SlotVariableSpec>& wanted);
// Says so on stderr, of a table that has rows of that content and now gets an optimizer.
void SayThatStateStartsAnew(const std::vector<SlotVariableSpec>& held, int64_t step,
                            const OptimizerOptions& options, int64_t dim, const std::string& table);
// The floats from a row to its slot `name`; -1 if there is none, or if it is not `width` wide. A
// negative `width` allows any.
int64_t OffsetOfSlot(const std::vector<SlotVariableSpec>& slots, int64_t dim,
                     const std::string& name, int64_t width = -1);
// Where each slot of a new layout comes from in the old one.
struct KeptSlot {
  int64_t offset;       // floats from the old row; -1: the slot starts from its initial value
  bool may_be_unknown;  // elements that are NaN do so too: an import did not know them
};
std::vector<KeptSlot> KeptSlots(const std::vector<SlotVariableSpec>& old_slots,
                                const std::vector<SlotVariableSpec>& new_slots, int64_t dim);

// Copies the saved slots among a row's slot rows to `saved`, side by side.
void CopySavedSlots(const std::vector<SlotVariableSpec>& slots, const float* slot_rows,
                    float* saved);

}  // namespace sok

#endif  // SOK_CORE_SLOTS_H_
