// As much of CUDA's runtime as the backend uses: device memory (device_memory.h), streams
// (streams.h) and kernels (fibers.h) on the CPU.
#ifndef SOK_TESTS_EMULATOR_CUDA_RUNTIME_H_
#define SOK_TESTS_EMULATOR_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <tuple>

#include "cpp/tests/emulator/fibers.h"
#include "cpp/tests/emulator/streams.h"

#define CUDART_VERSION 12010
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaMemPoolAttr { cudaMemPoolAttrReleaseThreshold };
enum cudaMemAllocationType { cudaMemAllocationTypePinned };
enum cudaMemLocationType { cudaMemLocationTypeDevice };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaMemPool_t = struct CUmemPoolHandle_st*;
struct cudaMemPoolProps {
  cudaMemAllocationType allocType;
  struct {
    cudaMemLocationType type;
    int id;
  } location;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};
inline constexpr unsigned cudaEventDefault = 0, cudaEventDisableTiming = 2;
struct cudaDeviceProp {
  char name[256];
  int l2CacheSize, multiProcessorCount;
};
inline const cudaStream_t cudaStreamLegacy = reinterpret_cast<cudaStream_t>(0x1);

namespace emulator {
inline int64_t bytes_allocated = 0;           // for tests: what is not freed in the end
inline int64_t num_allocations = 0;           // for tests: a warm step makes none
inline int64_t num_host_waits = 0;            // for tests: a warm step makes none
inline int64_t num_stream_waits = 0;          // for tests: streams that were put behind another
inline int64_t num_event_calls = 0;           // records and queries
inline int64_t num_launches = 0;              // kernels, fills and copies, those of CUB included
inline int driver_version = 12010;            // for tests: older ones take fewer arguments
inline int64_t allocations_left = INT64_MAX;  // for tests: memory runs out after so many

using Lock = std::lock_guard<std::recursive_mutex>;

// Puts `work` on the stream, and on the count of launches.
inline void Enqueue(cudaStream_t stream, std::function<void()> work) {
  ++num_launches;
  Streams::Get().Add(stream, std::move(work));
}

}  // namespace emulator

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "emulated error";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = emulator::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  emulator::current_device = device;
  emulator::MakeContext();
  return cudaSuccess;
}

// The driver's contexts: the number of the device plus one, null for none.
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound
};
inline constexpr unsigned long long cudaEnableDefault = 0;
inline int cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(
      emulator::has_context ? static_cast<intptr_t>(emulator::current_device) + 1 : 0);
  return 0;
}
inline int cuCtxSetCurrent(void* context) {
  emulator::has_context = context != nullptr;
  emulator::current_device =
      context == nullptr ? 0 : static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}
inline cudaError_t cudaGetDriverEntryPoint(const char* name, void** call, unsigned long long,
                                           cudaDriverEntryPointQueryResult* found) {
  const bool sets = std::strcmp(name, "cuCtxSetCurrent") == 0;
  *found = cudaDriverEntryPointSuccess;
  *call =
      sets ? reinterpret_cast<void*>(&cuCtxSetCurrent) : reinterpret_cast<void*>(&cuCtxGetCurrent);
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulator", 1 << 20, 1};
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* bytes) {
  emulator::MakeContext();
  *free_bytes = *bytes = size_t{1} << 32;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  return *version = emulator::driver_version, cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_host_waits;
  emulator::Streams::Get().FinishAll();
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  emulator::MakeContext();
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t,
                                           cudaStream_t stream) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  if (emulator::allocations_left-- <= 0) return cudaErrorMemoryAllocation;
  auto& memory = emulator::DeviceMemory::Get();
  char* const block = memory.Allocate(bytes);
  if (block == nullptr) return cudaErrorMemoryAllocation;
  emulator::Streams::Get().Add(stream, [&memory, block] { memory.Begin(block); });
  *pointer = block;
  emulator::bytes_allocated += static_cast<int64_t>(bytes);
  ++emulator::num_allocations;
  return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  emulator::MakeContext();
  if (pointer == nullptr) return cudaSuccess;
  const emulator::Lock lock(emulator::device_mutex);
  auto& memory = emulator::DeviceMemory::Get();
  memory.FreeByHost(pointer);
  emulator::bytes_allocated -= memory.BytesOf(pointer);
  char* const block = static_cast<char*>(pointer);
  emulator::Streams::Get().Add(stream, [&memory, block] { memory.End(block); });
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  emulator::MakeContext();
  *pointer = std::malloc(bytes);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  const emulator::Lock lock(emulator::device_mutex);
  emulator::DeviceMemory::Get().AddPinned(*pointer, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* pointer) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  emulator::DeviceMemory::Get().RemovePinned(pointer);
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  const auto check = [=](bool now) {
    const auto& memory = emulator::DeviceMemory::Get();
    if (kind == cudaMemcpyHostToDevice) {
      memory.RequireHost(from, bytes, "cudaMemcpyAsync");
    } else {
      memory.RequireDevice(from, bytes, now, "cudaMemcpyAsync");
    }
    if (kind == cudaMemcpyDeviceToHost) {
      memory.RequireHost(to, bytes, "cudaMemcpyAsync");
    } else {
      memory.RequireDevice(to, bytes, now, "cudaMemcpyAsync");
    }
  };
  check(false);
  emulator::Enqueue(stream, [=] {
    check(true);
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  emulator::DeviceMemory::Get().RequireDevice(to, bytes, false, "cudaMemsetAsync");
  emulator::Enqueue(stream, [=] {
    emulator::DeviceMemory::Get().RequireDevice(to, bytes, true, "cudaMemsetAsync");
    if (bytes > 0) std::memset(to, value, bytes);
  });
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_host_waits;
  emulator::Streams::Get().Finish(stream);
  return cudaSuccess;
}

// An event is what was recorded last, if anything.
struct CUevent_st {
  std::shared_ptr<emulator::Streams::Point> last;
};
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  emulator::MakeContext();
  *event = new CUevent_st;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  emulator::MakeContext();
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_event_calls;
  event->last = emulator::Streams::Get().Record(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_stream_waits;
  if (event->last != nullptr) emulator::Streams::Get().WaitFor(stream, event->last);
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_event_calls;
  if (emulator::random_bits() % 4 == 0) return cudaErrorNotReady;
  emulator::Streams::Get().RunSome();
  return event->last == nullptr || event->last->passed ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  ++emulator::num_host_waits;
  if (event->last != nullptr) emulator::Streams::Get().Finish(event->last);
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;  // always: nothing is to depend on it
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  emulator::MakeContext();
  const emulator::Lock lock(emulator::device_mutex);
  // Arguments are taken now, as they are.
  const auto given = std::make_shared<std::tuple<std::remove_const_t<Parameters>...>>(arguments...);
  const auto check = [](bool now) {
    return [now](const auto&... each) { (emulator::CheckArgument(each, now), ...); };
  };
  std::apply(check(false), *given);
  emulator::Enqueue(config->stream, [=, grid = config->gridDim, block = config->blockDim] {
    std::apply(check(true), *given);
    gridDim = grid;
    blockDim = block;
    const std::function<void()> body = [&] { std::apply(kernel, *given); };
    const unsigned together = std::max(1u, 512 / blockDim.x);
    for (unsigned first = 0; first < gridDim.x; first += together) {
      emulator::Scheduler::Get().Run(first, std::min(together, gridDim.x - first), blockDim.x,
                                     body);
    }
    emulator::WeakMemory::Get().EndOfKernel();
  });
  return cudaSuccess;
}

// Another thread may go on before each access.
namespace emulator {

// Of shared memory, which is not weak; else of device memory.
template <typename T>
bool IsSharedAtomic(const T* pointer) {
  Scheduler::Get().MaybeYield();
  if (Scheduler::Get().IsShared(pointer)) return true;
  if (!DeviceMemory::Get().IsDevice(pointer)) Fail("an atomic operation on host memory");
  return false;
}
template <typename T>
T AtomicLoad(const T* pointer, bool acquire) {
  if (IsSharedAtomic(pointer)) return *pointer;
  return WeakMemory::Get().Load(pointer, acquire, Scheduler::Get().CurrentView());
}
template <typename T>
void AtomicStore(T* pointer, T value, bool release) {
  if (IsSharedAtomic(pointer)) {
    *pointer = value;
  } else {
    WeakMemory::Get().Store(pointer, value, release, Scheduler::Get().CurrentView());
  }
}
template <typename T, typename F>
T AtomicUpdate(T* pointer, const F& f) {
  if (IsSharedAtomic(pointer)) {
    const T before = *pointer;
    *pointer = f(before);
    return before;
  }
  return WeakMemory::Get().Update(pointer, f, Scheduler::Get().CurrentView());
}

}  // namespace emulator

inline void __syncthreads() { emulator::Scheduler::Get().Barrier(); }
// `__shared__ type name[count]` of a kernel.
#define SOK_SHARED(type, name, count) \
  static const char name##_site = 0;  \
  type* const name =                  \
      static_cast<type*>(emulator::Scheduler::Get().Shared(&name##_site, (count) * sizeof(type)))

template <typename T>
T __ldcg(const T* pointer) {
  return emulator::AtomicLoad(pointer, false);
}
template <typename T>
T atomicAdd(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T before) { return before + value; });
}
template <typename T>
T atomicMin(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T before) { return std::min(before, value); });
}
template <typename T>
T atomicMax(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T before) { return std::max(before, value); });
}
template <typename T>
T atomicCAS(T* pointer, T expected, T desired) {
  return emulator::AtomicUpdate(pointer,
                                [=](T before) { return before == expected ? desired : before; });
}
template <typename T>
T atomicExch(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T) { return value; });
}
template <typename T>
T atomicOr(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T before) { return before | value; });
}
template <typename T>
T atomicAnd(T* pointer, T value) {
  return emulator::AtomicUpdate(pointer, [=](T before) { return before & value; });
}

#endif  // SOK_TESTS_EMULATOR_CUDA_RUNTIME_H_
