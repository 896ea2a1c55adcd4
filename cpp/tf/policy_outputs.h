// What the ops on policies give, for tables wherever their memory is. In host memory.
#ifndef SOK_TF_POLICY_OUTPUTS_H_
#define SOK_TF_POLICY_OUTPUTS_H_

#include "cpp/core/key_records.h"
#include "cpp/tf/common.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

// Outputs 0 to 6 of SokTablePopEvicted, of a table of width `dim`.
absl::Status WriteEvictedRows(tensorflow::OpKernelContext* ctx, const EvictedRows& popped,
                              int64_t dim);

// The output of SokTableStatistics.
absl::Status WriteStatistics(tensorflow::OpKernelContext* ctx, const PolicyStatistics& statistics);

}  // namespace sok

#endif  // SOK_TF_POLICY_OUTPUTS_H_
