#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/device/host_buffer.cuh"

namespace sok {
namespace cuda {
namespace {

constexpr size_t kAlignment = 256;

size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The pool of the current device. It is kept for the life of the process: buffers may be freed
// while static objects are destroyed.
cudaMemPool_t Pool() {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t>* const pools = new std::map<int, cudaMemPool_t>;
  const int device = CurrentDevice();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto present = pools->find(device);
  if (present != pools->end()) return present->second;
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  cudaMemPool_t pool;
  CudaCheck(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate");
  uint64_t keep = UINT64_MAX;  // bytes that stay in the pool when a stream is synchronised
  CudaCheck(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
            "cudaMemPoolSetAttribute");
  (*pools)[device] = pool;
  return pool;
}

// The driver's calls for the context that is current on a thread. The runtime has only the number
// of a device, which is 0 on a thread without a context, and cudaSetDevice(0) would make one there.
struct ContextCalls {
  int (*get)(void** context);
  int (*set)(void* context);
};

#if CUDART_VERSION >= 12050
cudaError_t FindInDriver(const char* name, void** call, cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, call, 12000, cudaEnableDefault, found);
}
#else
cudaError_t FindInDriver(const char* name, void** call, cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPoint(name, call, cudaEnableDefault, found);
}
#endif

template <typename Call>
void FindInDriver(const char* name, Call* call) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  CudaCheck(FindInDriver(name, &address, &found), "cudaGetDriverEntryPoint");
  if (found != cudaDriverEntryPointSuccess) throw CudaError(std::string("No ") + name);
  *call = reinterpret_cast<Call>(address);
}

const ContextCalls& Contexts() {
  static const ContextCalls calls = [] {
    ContextCalls found;
    FindInDriver("cuCtxGetCurrent", &found.get);
    FindInDriver("cuCtxSetCurrent", &found.set);
    return found;
  }();
  return calls;
}

void* CurrentContext() {
  void* context = nullptr;
  return Contexts().get(&context) == 0 ? context : nullptr;  // fails before the first call
}

constexpr size_t kMostInPinned = size_t{64} << 10;  // bytes of a copy

}  // namespace

void CudaCheck(int code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // the next call must not report this error again
  throw CudaError(std::string(what) +
                  " failed: " + cudaGetErrorString(static_cast<cudaError_t>(code)));
}

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

void RequireDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return;
  cudaGetLastError();
  throw CudaError(
      std::string("A CUDA device and its driver are required for tables in device memory. "
                  "Received: ") +
      (error == cudaSuccess ? "no device" : cudaGetErrorString(error)));
}

void Synchronize(Stream stream) {
  CudaCheck(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

int CurrentDevice() {
  int device = 0;
  CudaCheck(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

DeviceScope::DeviceScope(int device) : before_(CurrentContext()) {
  CudaCheck(cudaSetDevice(device), "cudaSetDevice");
}
DeviceScope::~DeviceScope() { Contexts().set(before_); }

void OnDevice(int device, const std::function<void()>& fn) noexcept {
  try {
    const DeviceScope scope(device);
    fn();
    cudaGetLastError();  // no later call must report what failed here
  } catch (const CudaError&) {
  }
}

void ReleaseMemory() {
  CudaCheck(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  CudaCheck(cudaMemPoolTrimTo(Pool(), 0), "cudaMemPoolTrimTo");
}

void CopyToDevice(Stream stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  CudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  // CUDA copies pageable memory before it returns, but not pinned memory, and not for sure where
  // the device can read the host's pages.
  Synchronize(stream);
}

void CopyToHost(Stream stream, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return Synchronize(stream);
  const PinnedPiece piece(bytes <= kMostInPinned ? bytes : 0);
  void* const target = bytes <= kMostInPinned ? piece.as<void>() : to;
  CudaCheck(cudaMemcpyAsync(target, from, bytes, cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
  Synchronize(stream);
  if (target != to) std::memcpy(to, target, bytes);
}

void CopyOnDevice(Stream stream, void* to, const void* from, size_t bytes) {
  CudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

void FillWithZeros(Stream stream, void* to, size_t bytes) {
  if (bytes > 0) CudaCheck(cudaMemsetAsync(to, 0, bytes, stream), "cudaMemsetAsync");
}

void FillWithOnes(Stream stream, void* to, size_t bytes) {
  if (bytes > 0) CudaCheck(cudaMemsetAsync(to, 0xFF, bytes, stream), "cudaMemsetAsync");
}

void OrderAfter(Stream later, Stream earlier) {
  if (later == earlier) return;
  cudaEvent_t event;
  CudaCheck(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  cudaError_t error = cudaEventRecord(event, earlier);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(later, event, 0);
  cudaEventDestroy(event);  // CUDA keeps it until it has happened
  CudaCheck(error, "cudaStreamWaitEvent");
}

DeviceInfo CurrentDeviceInfo() {
  cudaDeviceProp properties;
  CudaCheck(cudaGetDeviceProperties(&properties, CurrentDevice()), "cudaGetDeviceProperties");
  DeviceInfo info;
  size_t free_bytes = 0, bytes = 0;
  CudaCheck(cudaMemGetInfo(&free_bytes, &bytes), "cudaMemGetInfo");
  CudaCheck(cudaDriverGetVersion(&info.driver), "cudaDriverGetVersion");
  CudaCheck(cudaRuntimeGetVersion(&info.runtime), "cudaRuntimeGetVersion");
  info.name = properties.name;
  info.bytes = static_cast<int64_t>(bytes);
  info.free_bytes = static_cast<int64_t>(free_bytes);
  info.l2_bytes = properties.l2CacheSize;
  info.num_multiprocessors = properties.multiProcessorCount;
  return info;
}

StreamPoint::StreamPoint() : device_(CurrentDevice()) {
  CudaCheck(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
}

StreamPoint::~StreamPoint() {
  OnDevice(device_, [this] { cudaEventDestroy(event_); });  // fails while the process exits
}

void StreamPoint::Record(Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  CudaCheck(cudaEventRecord(event_, stream), "cudaEventRecord");
  has_passed_ = false;
  asked_in_ = 0;
}

bool StreamPoint::HasPassed(uint64_t round) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_passed_ || asked_in_ == round) return has_passed_;
  asked_in_ = round;
  const cudaError_t state = cudaEventQuery(event_);
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // not a failure, but CUB checks the last error after its launches
    return false;
  }
  CudaCheck(state, "cudaEventQuery");
  return has_passed_ = true;
}

void StreamPoint::Wait() { CudaCheck(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

uint64_t StreamPoint::NextRound() {
  static std::atomic<uint64_t> round{0};
  return ++round;
}

TimedEvent::TimedEvent() : device_(CurrentDevice()) {
  CudaCheck(cudaEventCreateWithFlags(&event_, cudaEventDefault), "cudaEventCreate");
}

TimedEvent::~TimedEvent() {
  OnDevice(device_, [this] { cudaEventDestroy(event_); });
}

void TimedEvent::Record(Stream stream) {
  CudaCheck(cudaEventRecord(event_, stream), "cudaEventRecord");
}

double TimedEvent::SecondsSince(const TimedEvent& earlier) const {
  CudaCheck(cudaEventSynchronize(event_), "cudaEventSynchronize");
  float milliseconds = 0.0f;
  CudaCheck(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
  return milliseconds / 1e3;
}

Buffer::Buffer(size_t bytes, Stream stream)
    : bytes_(bytes), stream_(stream), device_(CurrentDevice()) {
  if (bytes == 0) return;
  cudaError_t error = cudaMallocFromPoolAsync(&data_, bytes, Pool(), stream);
  if (error == cudaErrorMemoryAllocation) {
    // The memory that the pool keeps may be in pieces that are too small, or not yet freed because
    // its stream is behind.
    cudaGetLastError();
    ReleaseMemory();
    error = cudaMallocFromPoolAsync(&data_, bytes, Pool(), stream);
  }
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw DeviceMemoryError("Device memory ran out while allocating " + std::to_string(bytes) +
                            " bytes");
  }
  CudaCheck(error, "cudaMallocFromPoolAsync");
}

void Buffer::Free() noexcept {
  if (data_ != nullptr) {
    // Stream 0 is a different stream on each device. It fails only while the process exits.
    OnDevice(device_, [this] { cudaFreeAsync(data_, stream_); });
  }
  data_ = nullptr;
  bytes_ = 0;
}

void Buffer::Zero() { FillWithZeros(stream_, data_, bytes_); }

void Workspace::Reset(Stream stream) {
  used_ = 0;
  const size_t needed = total_;
  total_ = 0;
  const int device = CurrentDevice();
  if (blocks_.size() <= 1 && stream == stream_ && device == device_) return;
  blocks_.clear();
  stream_ = stream;
  device_ = device;
  if (needed > 0) blocks_.emplace_back(needed, stream);
}

constexpr size_t kMostAhead = size_t{256} << 20;  // bytes; larger blocks only if asked for

void* Workspace::TakeBytes(size_t bytes) {
  bytes = Aligned(bytes);
  if (blocks_.empty() || used_ + bytes > blocks_.back().bytes()) {
    const size_t last = blocks_.empty() ? 0 : blocks_.back().bytes();
    const size_t ahead = std::min(2 * last, kMostAhead);
    blocks_.emplace_back(std::max({bytes, ahead, size_t{1} << 20}), stream_);
    used_ = 0;
  }
  char* const piece = blocks_.back().as<char>() + used_;
  used_ += bytes;
  total_ += bytes;
  return piece;
}

}  // namespace cuda
}  // namespace sok
