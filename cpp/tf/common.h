// What every kernel of this library shares: the table as a TF resource, TF's threads as an
// `Executor`, and the one place where the core's exceptions become a `Status`.
#ifndef SOK_TF_COMMON_H_
#define SOK_TF_COMMON_H_

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace sok {

// TensorFlow names that every kernel uses.
using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ScalarShape;
using tensorflow::shape_inference::ShapeHandle;

// Calls `fn` with what a table runs on. What `fn` throws becomes a Status as in Guard.
using TableRunner = std::function<absl::Status(const std::function<void(CallContext)>& fn)>;

// A table as a TF resource, in host or device memory.
class TableResource : public tensorflow::ResourceBase {
 public:
  ~TableResource() override;  // also frees tables made aside for it
  virtual Table& table() const = 0;
  // Calls `fn` with what this op's table runs on: TF's threads, or its stream. What `fn` throws
  // becomes a Status as in Guard.
  virtual absl::Status Run(OpKernelContext* ctx, const std::function<void(CallContext)>& fn) = 0;
  // The same for calls after this op, from any thread.
  virtual TableRunner RunnerOf(OpKernelContext* ctx) = 0;
  const TableOptions& options() const { return table().options(); }
  std::string DebugString() const override;
};

class HostTableResource final : public TableResource {
 public:
  HostTableResource(OpKernelContext*, const TableOptions& options) : table_(options) {}
  CpuTable& table() const override { return table_; }
  absl::Status Run(OpKernelContext* ctx, const std::function<void(CallContext)>& fn) override;
  TableRunner RunnerOf(OpKernelContext* ctx) override;

 private:
  mutable CpuTable table_;
};

using TablePtr = tensorflow::core::RefCountPtr<TableResource>;
using HostTablePtr = tensorflow::core::RefCountPtr<HostTableResource>;

// The table behind the op's first input.
absl::Status LookupTable(OpKernelContext* ctx, TablePtr* table);
// Runs `fn` on it. Tells the program if a table that evicts by score was given more than it holds.
absl::Status WithTable(OpKernelContext* ctx, const std::function<void(Table&, CallContext)>& fn);
// Sets output 0 to the number that `fn` returns for it.
absl::Status SetNumberOfTable(OpKernelContext* ctx,
                              const std::function<int64_t(Table&, CallContext)>& fn);
// The tables behind the list input `name`, which are in one kind of memory: HostTablePtr etc.
template <typename Resource>
absl::Status LookupTables(OpKernelContext* ctx, const char* name,
                          std::vector<tensorflow::core::RefCountPtr<Resource>>* tables) {
  OpInputList handles;
  TF_RETURN_IF_ERROR(ctx->input_list(name, &handles));
  for (int i = 0; i < handles.size(); ++i) {
    TablePtr any;
    TF_RETURN_IF_ERROR(
        tensorflow::LookupResource(ctx, handles[i].scalar<tensorflow::ResourceHandle>()(), &any));
    Resource* const table = dynamic_cast<Resource*>(any.get());
    if (table == nullptr) {
      return absl::InvalidArgumentError(
          "the tables of an op must be on the op's device. Received: " + any->DebugString());
    }
    any.release();  // `tables` takes over the reference
    tables->emplace_back(table);
  }
  return absl::OkStatus();
}

// The list inputs, or outputs, of these names.
using InputLists = std::initializer_list<std::pair<const char*, OpInputList*>>;
using OutputLists = std::initializer_list<std::pair<const char*, OpOutputList*>>;
absl::Status GetLists(OpKernelContext* ctx, InputLists inputs, OutputLists outputs = {});

// ForEachOf (core/cpu/group.h) on TF's threads; exceptions become a Status as in Guard.
absl::Status ForEachTable(OpKernelContext* ctx, const std::vector<int64_t>& num_keys,
                          FunctionRef<Executor&, int64_t> fn);

// Keys are int64 in TF and uint64 in the core: the same bits. Texts are tstring in TF.
template <typename T>
using TfType =
    std::conditional_t<std::is_same_v<T, uint64_t>, int64_t,
                       std::conditional_t<std::is_same_v<T, std::string>, tensorflow::tstring, T>>;

// The elements of a tensor, row by row.
template <typename T>
std::vector<T> ValuesOf(const Tensor& tensor) {
  const T* const values = tensor.flat<T>().data();
  return {values, values + tensor.NumElements()};
}

// Output `i`, of this shape, with these values.
template <typename T>
absl::Status SetOutput(OpKernelContext* ctx, int i, const TensorShape& shape,
                       const std::vector<T>& values) {
  Tensor* out;
  TF_RETURN_IF_ERROR(ctx->allocate_output(i, shape, &out));
  std::copy(values.begin(), values.end(), out->flat<TfType<T>>().data());
  return absl::OkStatus();
}
template <typename T>
absl::Status SetVector(OpKernelContext* ctx, int i, const std::vector<T>& values) {
  return SetOutput(ctx, i, TensorShape({static_cast<int64_t>(values.size())}), values);
}
template <typename T>
absl::Status SetScalar(OpKernelContext* ctx, int i, const T& value) {
  return SetOutput(ctx, i, TensorShape({}), std::vector<T>{value});
}

// Outputs [first, first + count), each empty and of one axis.
inline absl::Status SetEmpty(OpKernelContext* ctx, int first, int count) {
  Tensor* out;
  for (int i = first; i < first + count; ++i) {
    TF_RETURN_IF_ERROR(ctx->allocate_output(i, TensorShape({0}), &out));
  }
  return absl::OkStatus();
}

// Part of a shape function: output i has the axes shapes[i], where -1 is any length.
absl::Status SetShapes(InferenceContext* c, std::initializer_list<std::vector<int64_t>> shapes);
// Output i has any number of rows of dims[i] floats, by the attribute `dims`.
absl::Status SetRowShapes(InferenceContext* c);

// Reads the attribute prefix + name of each field that Options::ForEachField lists.
template <typename Options>
absl::Status ReadFields(OpKernelConstruction* ctx, Options* options,
                        const std::string& prefix = "") {
  absl::Status status;
  Options::ForEachField(*options, [&](const char* name, auto& field, auto...) {
    using Field = std::decay_t<decltype(field)>;
    std::conditional_t<std::is_same_v<Field, double>, float, Field> value{};
    status.Update(ctx->GetAttr(prefix + name, &value));
    field = value;
  });
  return status;
}

// A kernel without attributes: a function of its inputs.
template <absl::Status (*kCompute)(OpKernelContext*)>
class FunctionOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* ctx) override { OP_REQUIRES_OK(ctx, kCompute(ctx)); }
};

// A kernel for tables in any memory. Its outputs are where the table is, except HostMemory ones.
#define SOK_REGISTER_TABLE_KERNEL(builder, Class)                         \
  REGISTER_KERNEL_BUILDER(builder.Device(tensorflow::DEVICE_CPU), Class); \
  REGISTER_KERNEL_BUILDER(builder.Device(tensorflow::DEVICE_GPU), Class)

// TF's intra-op pool. Its own threads run the ranges. The caller may run none of them, so it waits
// while the pool is busy with other calls (core/parallel.h).
class TfExecutor final : public Executor {
 public:
  explicit TfExecutor(OpKernelContext* ctx) : TfExecutor(PoolOf(ctx)) {}
  explicit TfExecutor(tensorflow::thread::ThreadPool* pool) : pool_(pool) {}
  static tensorflow::thread::ThreadPool* PoolOf(OpKernelContext* ctx);  // lives as long as TF does
  int num_threads() const override;
  void ParallelFor(int64_t n, int64_t grain, RangeFunction fn) override;

 private:
  tensorflow::thread::ThreadPool* pool_;
};

// Runs `fn` and turns what it throws into a Status: length_error (a full table) and lack of memory
// into ResourceExhausted, invalid_argument and out_of_range into InvalidArgument, OutOfStep into
// FailedPrecondition, others into Internal.
absl::Status Guard(const std::function<void()>& fn);

inline const uint64_t* Keys(const Tensor& keys) {
  return reinterpret_cast<const uint64_t*>(keys.flat<int64_t>().data());
}
inline uint64_t* Keys(Tensor* keys) {
  return reinterpret_cast<uint64_t*>(keys->flat<int64_t>().data());
}

// Flags are bool in TF and bytes in the core.
inline uint8_t* Flags(Tensor* flags) {
  return reinterpret_cast<uint8_t*>(flags->flat<bool>().data());
}

// Places among unique keys are uint32 in TF and int32 in the core: the same bits. TensorFlow would
// keep int32 results of a function in host memory, whatever device made them.
inline const int32_t* Places(const Tensor& inverse) {
  return reinterpret_cast<const int32_t*>(inverse.flat<uint32_t>().data());
}
inline int32_t* Places(Tensor* inverse) {
  return reinterpret_cast<int32_t*>(inverse->flat<uint32_t>().data());
}

// `rows`, which an error calls `what`, must have the shape [num_keys, dim] of a table's rows.
absl::Status CheckRowsShape(const char* what, const Tensor& keys, const Tensor& rows,
                            const TableOptions& options);

// The seed that tables created from now on draw their initial rows from. Set by `SokSetSeed`.
void SetProcessSeed(uint64_t seed);
absl::Status ProcessSeed(uint64_t* seed);

}  // namespace sok

#endif  // SOK_TF_COMMON_H_
