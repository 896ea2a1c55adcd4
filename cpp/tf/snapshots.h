// A table's snapshot as the outputs of SokTableExport and the inputs of SokTableImport, for tables
// wherever their memory is. Both are in host memory.
#ifndef SOK_TF_SNAPSHOTS_H_
#define SOK_TF_SNAPSHOTS_H_

#include "cpp/core/cpu/table.h"
#include "cpp/tf/common.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

// Outputs 0 to 8 of SokTableExport, of a table of width `dim`.
absl::Status WriteSnapshot(tensorflow::OpKernelContext* ctx, const TableSnapshot& snapshot,
                           int64_t dim);

// Inputs 1 to 9 of SokTableImport. Fails on what does not fit a table of these options, also on
// more keys than it may hold if they are to `replace` its content: a bad import must not cost what
// is there.
absl::Status ReadSnapshot(tensorflow::OpKernelContext* ctx, const TableOptions& options,
                          bool replace, TableSnapshot* snapshot);

}  // namespace sok

#endif  // SOK_TF_SNAPSHOTS_H_
