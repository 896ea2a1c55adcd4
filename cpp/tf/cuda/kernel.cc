#include "cpp/tf/cuda/kernel.h"

#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "cpp/tf/table_handle.h"

namespace sok {

SOK_REGISTER_DEVICE_KERNEL(Name("SokTableHandle").HostMemory("handle"),
                           TableHandleOp<DeviceTableResource>);

DeviceTableResource::DeviceTableResource(OpKernelContext* ctx, const TableOptions& options)
    : table_(options, /*max_load_factor=*/0.875, StreamOf(ctx)) {}

absl::Status DeviceTableResource::Run(OpKernelContext* ctx,
                                      const std::function<void(CallContext)>& fn) {
  return Guard([&] { fn(StreamOf(ctx)); });
}

TableRunner DeviceTableResource::RunnerOf(OpKernelContext* ctx) {
  return [stream = StreamOf(ctx),
          device = cuda::CurrentDevice()](const std::function<void(CallContext)>& fn) {
    return Guard([&] {
      const cuda::DeviceScope scope(device);
      fn(stream);
    });
  };
}

absl::Status WithTables(OpKernelContext* ctx, const std::vector<DeviceTablePtr>& tables,
                        const std::function<void(cuda::Stream)>& fn) {
  std::set<cuda::HeldMutex*> mutexes;
  for (const DeviceTablePtr& table : tables) mutexes.insert(&table->table().mutex());
  return Guard([&] {
    const cuda::HeldMutexes locks(mutexes);
    fn(StreamOf(ctx));
  });
}

namespace {
struct SharedWorkspace {
  std::mutex mutex;
  cuda::Workspace workspace;
};

// Kept for the life of the process, because TF keeps its streams.
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
