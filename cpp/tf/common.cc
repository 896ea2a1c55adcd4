#include "cpp/tf/common.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/message.h"
#include "cpp/core/cuda/device/device.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace sok {

namespace {

using SurplusCallback = void (*)(const char* table, int64_t max_capacity, int64_t num_keys);
std::atomic<SurplusCallback> on_surplus{nullptr};

// Newer TensorFlow versions deprecate the constructor; 2.16 to 2.18 have nothing else.
template <typename Pool>
auto InBlocksOf(int64_t size, int) -> decltype(Pool::SchedulingParams::Fixed(size)) {
  return Pool::SchedulingParams::Fixed(size);
}

template <typename Pool>
auto InBlocksOf(int64_t size, long) {
  return typename Pool::SchedulingParams(Pool::SchedulingStrategy::kFixedBlockSize, std::nullopt,
                                         size);
}

}  // namespace

std::string TableResource::DebugString() const {
  return absl::StrCat("EmbeddingVariable '", options().name, "', dim ", options().dim);
}

absl::Status HostTableResource::Run(OpKernelContext* ctx,
                                    const std::function<void(CallContext)>& fn) {
  return RunnerOf(ctx)(fn);
}

TableRunner HostTableResource::RunnerOf(OpKernelContext* ctx) {
  return [pool = TfExecutor::PoolOf(ctx)](const std::function<void(CallContext)>& fn) {
    TfExecutor ex(pool);
    return Guard([&] { fn(ex); });
  };
}

absl::Status LookupTable(OpKernelContext* ctx, TablePtr* table) {
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, 0), table);
}

absl::Status GetLists(OpKernelContext* ctx, InputLists inputs, OutputLists outputs) {
  for (const auto& [name, list] : inputs) TF_RETURN_IF_ERROR(ctx->input_list(name, list));
  for (const auto& [name, list] : outputs) TF_RETURN_IF_ERROR(ctx->output_list(name, list));
  return absl::OkStatus();
}

absl::Status WithTable(OpKernelContext* ctx, const std::function<void(Table&, CallContext)>& fn) {
  TablePtr table;
  TF_RETURN_IF_ERROR(LookupTable(ctx, &table));
  const absl::Status status =
      table->Run(ctx, [&](CallContext context) { fn(table->table(), context); });
  const int64_t surplus = table->table().TakeSurplus();
  const SurplusCallback tell = on_surplus;
  if (surplus > 0 && tell != nullptr) {
    tell(table->options().name.c_str(), table->options().max_capacity, surplus);
  }
  return status;
}

absl::Status SetNumberOfTable(OpKernelContext* ctx,
                              const std::function<int64_t(Table&, CallContext)>& fn) {
  Tensor* number;  // before the table changes
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({}), &number));
  return WithTable(ctx, [&](Table& table, CallContext context) {
    number->scalar<int64_t>()() = fn(table, context);
  });
}

absl::Status SetShapes(InferenceContext* c, std::initializer_list<std::vector<int64_t>> shapes) {
  int i = 0;
  for (const std::vector<int64_t>& shape : shapes) {
    std::vector<tensorflow::shape_inference::DimensionHandle> axes;
    for (const int64_t length : shape) axes.push_back(c->MakeDim(length));
    c->set_output(i++, c->MakeShape(axes));
  }
  return absl::OkStatus();
}

absl::Status SetRowShapes(InferenceContext* c) {
  std::vector<int64_t> dims;
  TF_RETURN_IF_ERROR(c->GetAttr("dims", &dims));
  for (size_t i = 0; i < dims.size(); ++i) {
    c->set_output(i, c->Matrix(InferenceContext::kUnknownDim, dims[i]));
  }
  return absl::OkStatus();
}

tensorflow::thread::ThreadPool* TfExecutor::PoolOf(OpKernelContext* ctx) {
  return ctx->device()->tensorflow_cpu_worker_threads()->workers;
}

int TfExecutor::num_threads() const { return std::max(1, pool_->NumThreads()); }

void TfExecutor::ParallelFor(int64_t n, int64_t grain, RangeFunction fn) {
  CheckMayWaitForPool();
  if (n <= 0) return;
  // Several blocks per thread, so that a thread that loses its core for a while delays little.
  constexpr int64_t kBlocksPerThread = 4;
  const int64_t blocks = num_threads() * kBlocksPerThread;
  const int64_t block = std::max<int64_t>(std::max<int64_t>(grain, 1), (n + blocks - 1) / blocks);
  if (block >= n || num_threads() == 1) {
    const InRange in_range;
    fn(0, n);
    return;
  }
  // TF's pool does not handle exceptions: catch in the worker, rethrow in the caller.
  std::mutex mutex;
  std::exception_ptr error;
  int64_t error_begin = n;
  const auto params = InBlocksOf<tensorflow::thread::ThreadPool>(block, 0);
  pool_->ParallelFor(n, params, [&](int64_t begin, int64_t end) {
    const InRange in_range;
    try {
      fn(begin, end);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      if (begin < error_begin) {
        error_begin = begin;
        error = std::current_exception();
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

absl::Status Guard(const std::function<void()>& fn) {
  try {
    fn();
    return absl::OkStatus();
  } catch (const std::length_error& e) {
    return absl::ResourceExhaustedError(e.what());
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory while growing an embedding table");
  } catch (const OutOfStep& e) {
    return absl::FailedPreconditionError(e.what());
  } catch (const cuda::DeviceMemoryError& e) {
    return absl::ResourceExhaustedError(
        absl::StrCat(e.what(),
                     ". TensorFlow takes nearly all of a device's memory for itself unless "
                     "told to leave some to tables, before anything else: "
                     "tf.config.experimental.set_memory_growth(gpu, True)"));
  } catch (const std::invalid_argument& e) {
    return absl::InvalidArgumentError(e.what());
  } catch (const std::out_of_range& e) {
    return absl::InvalidArgumentError(e.what());
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  }
}

absl::Status ForEachTable(OpKernelContext* ctx, const std::vector<int64_t>& num_keys,
                          FunctionRef<Executor&, int64_t> fn) {
  TfExecutor ex(ctx);
  return Guard([&] { ForEachOf(ex, num_keys, fn); });
}

absl::Status CheckRowsShape(const char* what, const Tensor& keys, const Tensor& rows,
                            const TableOptions& options) {
  const TensorShape required({keys.NumElements(), options.dim});
  if (rows.shape() == required) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " must have the shape [num_keys, dim] = ", required.DebugString(),
                   ". Received: ", rows.shape().DebugString(), " (table '", options.name, "')"));
}

namespace {
std::mutex seed_mutex;
bool seed_set = false;
uint64_t process_seed = 0;
}  // namespace

void SetProcessSeed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(seed_mutex);
  process_seed = seed;
  seed_set = true;
}

absl::Status ProcessSeed(uint64_t* seed) {
  std::lock_guard<std::mutex> lock(seed_mutex);
  if (!seed_set) {
    return absl::FailedPreconditionError(
        "an embedding table is created before sok.Init has run. Call "
        "sok.Init(global_batch_size=...)"
        " first; in a graph, run the op it returns before any other.");
  }
  *seed = process_seed;
  return absl::OkStatus();
}

}  // namespace sok

// Called, maybe in a thread of an op, if a write brought so many keys more than a table holds.
extern "C" __attribute__((visibility("default"))) void sok_on_surplus(
    sok::SurplusCallback callback) {
  sok::on_surplus = callback;
}
