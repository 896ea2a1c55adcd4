// What every kernel of this library shares: the table as a TF resource, TF's threads as an
// `Executor`, and the one place where the core's exceptions become a `Status`.
#ifndef SOK_TF_COMMON_H_
#define SOK_TF_COMMON_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"

namespace sok {

class TableResource final : public tensorflow::ResourceBase {
 public:
  explicit TableResource(const TableOptions& options) : table_(options) {}
  static TableResource* Create(tensorflow::OpKernelContext*, const TableOptions& options) {
    return new TableResource(options);
  }
  CpuTable& table() { return table_; }
  std::string DebugString() const override;

 private:
  CpuTable table_;
};

using TablePtr = tensorflow::core::RefCountPtr<TableResource>;

// The table behind input `index` of the op.
absl::Status LookupTable(tensorflow::OpKernelContext* ctx, int index, TablePtr* table);
// The tables behind the list input `name`.
absl::Status LookupTables(tensorflow::OpKernelContext* ctx, const char* name,
                          std::vector<TablePtr>* tables);

// TF's intra-op pool. The calling thread takes part, so a pool that is busy only slows a call down.
class TfExecutor final : public Executor {
 public:
  explicit TfExecutor(tensorflow::OpKernelContext* ctx);
  int num_threads() const override;
  void ParallelFor(int64_t n, int64_t grain,
                   const std::function<void(int64_t, int64_t)>& fn) override;

 private:
  tensorflow::thread::ThreadPool* pool_;
};

// Runs `fn` and turns what it throws into a Status: length_error (a full table) and memory that ran
// out into ResourceExhausted, invalid_argument and out_of_range into InvalidArgument.
absl::Status Guard(const std::function<void()>& fn);

// Keys travel as int64 in TF and as uint64 in the core: the same bits.
inline const uint64_t* Keys(const tensorflow::Tensor& keys) {
  return reinterpret_cast<const uint64_t*>(keys.flat<int64_t>().data());
}
inline uint64_t* Keys(tensorflow::Tensor* keys) {
  return reinterpret_cast<uint64_t*>(keys->flat<int64_t>().data());
}

// `rows`, which an error calls `what`, must have the shape [num_keys, dim] of a table's rows.
absl::Status CheckRowsShape(const char* what, const tensorflow::Tensor& keys,
                            const tensorflow::Tensor& rows, const TableOptions& options);

// The seed that tables created from now on draw their initial rows from. Set by `SokSetSeed`.
void SetProcessSeed(uint64_t seed);
absl::Status ProcessSeed(uint64_t* seed);

}  // namespace sok

#endif  // SOK_TF_COMMON_H_
