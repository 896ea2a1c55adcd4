#include "cpp/tf/cuda/kernel.h"

#include <map>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok {

using tensorflow::OpKernelContext;

DeviceTableResource::DeviceTableResource(const TableOptions& options, cuda::Stream stream)
    : table_(options, /*max_load_factor=*/0.875, stream) {}

// Without the size, which only the device knows.
std::string DeviceTableResource::DebugString() const {
  return absl::StrCat("EmbeddingVariable '", options().name, "', dim ", options().dim,
                      ", in device memory");
}

absl::Status LookupTable(OpKernelContext* ctx, int index, DeviceTablePtr* table) {
  return tensorflow::LookupResource(ctx, tensorflow::HandleFromInput(ctx, index), table);
}

absl::Status LookupTables(OpKernelContext* ctx, const char* name,
                          std::vector<DeviceTablePtr>* tables) {
  tensorflow::OpInputList handles;
  TF_RETURN_IF_ERROR(ctx->input_list(name, &handles));
  tables->resize(handles.size());
  for (int i = 0; i < handles.size(); ++i) {
    const auto& handle = handles[i].scalar<tensorflow::ResourceHandle>()();
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(ctx, handle, &(*tables)[i]));
  }
  return absl::OkStatus();
}

absl::Status WithTable(OpKernelContext* ctx, DeviceTableResource& table,
                       const std::function<void(cuda::CudaTable&, cuda::Stream)>& fn) {
  return Guard([&] {
    const std::lock_guard<std::mutex> lock(table.mutex());
    fn(table.table(), StreamOf(ctx));
  });
}

absl::Status WithTables(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                        const std::function<void(cuda::Stream)>& fn) {
  // One order keeps two such ops from waiting for each other.
  std::set<DeviceTableResource*> order;
  for (const DeviceTablePtr& table : tables) order.insert(table.get());
  return Guard([&] {
    std::vector<std::unique_lock<std::mutex>> locks;
    for (DeviceTableResource* table : order) locks.emplace_back(table->mutex());
    fn(StreamOf(ctx));
  });
}

namespace {
struct SharedWorkspace {
  std::mutex mutex;
  cuda::Workspace workspace;
};

// Kept for the life of the process, as TF keeps its streams.
SharedWorkspace& WorkspaceOf(cuda::Stream stream) {
  static std::mutex mutex;
  static auto* const workspaces = new std::map<cuda::Stream, std::unique_ptr<SharedWorkspace>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& workspace = (*workspaces)[stream];
  if (workspace == nullptr) workspace = std::make_unique<SharedWorkspace>();
  return *workspace;
}
}  // namespace

absl::Status WithWorkspace(OpKernelContext* ctx,
                           const std::function<void(cuda::Workspace&, cuda::Stream)>& fn) {
  const cuda::Stream stream = StreamOf(ctx);
  SharedWorkspace& shared = WorkspaceOf(stream);
  return Guard([&] {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    const cuda::Workspace::Scope scope(shared.workspace, stream);
    fn(shared.workspace, stream);
  });
}

}  // namespace sok
