// What ops that export a table have in common: its snapshot as their first outputs.
#ifndef SOK_TF_SNAPSHOTS_H_
#define SOK_TF_SNAPSHOTS_H_

#include <memory>

#include "cpp/core/table.h"
#include "cpp/tf/common.h"

#define SOK_SNAPSHOT_IN_HOST_MEMORY(builder) \
  builder.HostMemory("handle")               \
      .HostMemory("keys")                    \
      .HostMemory("rows")                    \
      .HostMemory("slot_rows")               \
      .HostMemory("slot_names")              \
      .HostMemory("slot_widths")             \
      .HostMemory("records")                 \
      .HostMemory("waiting")                 \
      .HostMemory("counters")                \
      .HostMemory("step")                    \
      .HostMemory("optimizer_step")          \
      .HostMemory("initial_row_scale")

namespace sok {

// ResourceExhausted if a table may not hold so many keys.
absl::Status CheckReplacement(const TableOptions& options, int64_t num_keys);

// The table aside that sok_aside_keep has stored under this number (streams.cc), or null.
std::shared_ptr<Table> TakeMadeAside(int64_t number);
// Frees the tables made aside for a table.
void DropMadeAside(const TableResource* owner);

// Outputs 0 to 4, of a table of this dim.
absl::Status WriteRows(OpKernelContext* ctx, const KeyedRows& content, int64_t dim);
// Outputs 0 to 10.
absl::Status WriteSnapshot(OpKernelContext* ctx, const TableSnapshot& snapshot, int64_t dim);

}  // namespace sok

#endif  // SOK_TF_SNAPSHOTS_H_
