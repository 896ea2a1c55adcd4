// Slot variables: what an optimizer keeps right behind each row, on every device alike.
#ifndef SOK_CORE_SLOTS_H_
#define SOK_CORE_SLOTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/optimizer.h"

namespace sok {

// Slot variables an optimizer keeps right behind each row.
struct SlotSpec {
  std::string name;      // "accumulator", "momentum", "velocity", "last_step", ...
  int64_t width = 0;     // floats per row: dim, or 1 for a per-row scalar
  float initial = 0.0f;  // value in a new row
  bool saved =
      true;  // false: derived state that a dump leaves out (a caught-up row has it at `initial`)
};

// Slot variables of a rule, in the order that the rules of optimizer.h count on.
std::vector<SlotSpec> OptimizerSlots(const OptimizerOptions& options, int64_t dim);

// Throws std::invalid_argument where a table holds a slot of that name and another width, which it
// would lose: an imported one.
void CheckSlotWidths(const std::vector<SlotSpec>& present, const OptimizerOptions& options,
                     int64_t dim, const std::string& table);

}  // namespace sok

#endif  // SOK_CORE_SLOTS_H_
