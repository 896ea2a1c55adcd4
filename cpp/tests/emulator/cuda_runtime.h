// As much of CUDA's runtime as the backend uses, on host memory: device memory is the heap, streams
// run at once, and an event says "not yet" now and then, as one on a busy stream does.
#ifndef SOK_TESTS_EMULATOR_CUDA_RUNTIME_H_
#define SOK_TESTS_EMULATOR_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "cpp/tests/emulator/fibers.h"

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
inline std::mutex one_kernel;         // at a time, because TensorFlow runs ops on several threads
inline int64_t bytes_allocated = 0;   // for tests: what is not freed in the end
inline int64_t num_allocations = 0;   // for tests: a warm step makes none
inline int64_t num_host_waits = 0;    // for tests: a warm step makes none
inline int64_t num_stream_waits = 0;  // for tests: streams that were put behind another
inline int64_t num_launches = 0;      // kernels, fills and copies, those of CUB included
inline int current_device = 0;
inline int64_t allocations_left = INT64_MAX;  // for tests: memory runs out after so many
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
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulator", 1 << 20, 1};
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* bytes) {
  *free_bytes = *bytes = size_t{1} << 32;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 0, cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() {
  ++emulator::num_host_waits;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
inline cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
inline cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, cudaMemPool_t,
                                           cudaStream_t) {
  if (emulator::allocations_left-- <= 0) return cudaErrorMemoryAllocation;
  // Its size and device in front, and rubbish in it.
  char* const block = static_cast<char*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256));
  if (block == nullptr) return cudaErrorMemoryAllocation;
  std::memcpy(block, &bytes, sizeof(bytes));
  std::memcpy(block + sizeof(bytes), &emulator::current_device, sizeof(int));
  std::memset(block + 256, 0xA5, bytes);
  *pointer = block + 256;
  emulator::bytes_allocated += static_cast<int64_t>(bytes);
  ++emulator::num_allocations;
  return cudaSuccess;
}
inline cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  if (pointer == nullptr) return cudaSuccess;
  char* const block = static_cast<char*>(pointer) - 256;
  size_t bytes;
  std::memcpy(&bytes, block, sizeof(bytes));
  int device;
  std::memcpy(&device, block + sizeof(bytes), sizeof(device));
  if (device != emulator::current_device) {
    std::fprintf(stderr, "emulator: memory of device %d is freed with %d current\n", device,
                 emulator::current_device);
    std::abort();
  }
  emulator::bytes_allocated -= static_cast<int64_t>(bytes);
  std::memset(pointer, 0x5A, bytes);
  std::free(block);
  return cudaSuccess;
}
inline cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
  return *pointer == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  ++emulator::num_launches;
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  ++emulator::num_launches;
  if (bytes > 0) std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  ++emulator::num_host_waits;
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  ++emulator::num_stream_waits;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(1);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) {
  return emulator::random_bits() % 3 == 0 ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) {
  ++emulator::num_host_waits;
  return cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;  // always: nothing is to depend on it
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::lock_guard<std::mutex> lock(emulator::one_kernel);
  ++emulator::num_launches;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  const std::function<void()> body = [&] { kernel(Parameters(arguments)...); };
  const unsigned together = std::max(1u, 512 / blockDim.x);
  for (unsigned first = 0; first < gridDim.x; first += together) {
    emulator::Scheduler::Get().Run(first, std::min(together, gridDim.x - first), blockDim.x, body);
  }
  emulator::WeakMemory::Get().EndOfKernel();
  return cudaSuccess;
}

// Another thread may go on before each access.
namespace emulator {

template <typename T>
T AtomicLoad(const T* pointer, bool acquire) {
  Scheduler::Get().MaybeYield();
  return WeakMemory::Get().Load(pointer, acquire, Scheduler::Get().CurrentView());
}
template <typename T>
void AtomicStore(T* pointer, T value, bool release) {
  Scheduler::Get().MaybeYield();
  WeakMemory::Get().Store(pointer, value, release, Scheduler::Get().CurrentView());
}
template <typename T, typename F>
T AtomicUpdate(T* pointer, const F& f) {
  Scheduler::Get().MaybeYield();
  return WeakMemory::Get().Update(pointer, f, Scheduler::Get().CurrentView());
}

}  // namespace emulator

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
