// Devices, errors and memory: the base of the CUDA backend.
//
// Memory comes from a pool of the library through cudaMallocFromPoolAsync. Allocating and freeing
// are ordered with the work of a stream and never wait for it; the pool keeps freed memory. A warm
// step allocates nothing: its scratch comes from a Workspace that has grown to the size of the
// largest call.
//
// Streams are explicit everywhere; null is the default stream of the current device. A stream must
// outlive what was last used on it, because memory is freed in its order.
//
// Devices are the caller's choice (cudaSetDevice). Memory stays with the device that was current
// when it was allocated.
//
// Compiled by host compilers too: includes nothing of CUDA.
#ifndef SOK_CORE_CUDA_DEVICE_DEVICE_H_
#define SOK_CORE_CUDA_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct CUstream_st;
struct CUevent_st;

namespace sok {
namespace cuda {

using Stream = CUstream_st*;  // cudaStream_t
using Event = CUevent_st*;    // cudaEvent_t

class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class DeviceMemoryError : public CudaError {  // device memory ran out
 public:
  using CudaError::CudaError;
};

// Throws CudaError unless `code` is cudaSuccess. `what` names the call that gave it.
void CudaCheck(int code, const char* what);

int DeviceCount();     // 0 without a device or driver
void RequireDevice();  // throws CudaError that says what is missing
int CurrentDevice();
// Returns unused memory from the pool of the current device to the device, for other programs and
// libraries. Waits for the device.
void ReleaseMemory();

void Synchronize(Stream stream);  // waits for all work on the stream
void CopyToDevice(Stream stream, void* to, const void* from,
                  size_t bytes);                                             // waits
void CopyToHost(Stream stream, void* to, const void* from, size_t bytes);    // waits
void CopyOnDevice(Stream stream, void* to, const void* from, size_t bytes);  // async
void FillWithZeros(Stream stream, void* to, size_t bytes);                   // async
void FillWithOnes(Stream stream, void* to, size_t bytes);                    // async: all bits
void OrderAfter(Stream later, Stream earlier);  // what follows on `later` waits for `earlier`

// Makes a device current while it exists, for calls from threads with another current device or
// none. Afterwards the same context is current as before, or none: a context of a device that the
// process does not use would take 500 MiB there.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  void* const before_;  // CUcontext, or null
};

// Runs `fn` with `device` current, for destructors: from any thread, without throwing.
void OnDevice(int device, const std::function<void()>& fn) noexcept;

// What benchmark results should say about the current device.
struct DeviceInfo {
  std::string name;
  int64_t bytes = 0, free_bytes = 0, l2_bytes = 0;
  int num_multiprocessors = 0;
  int driver = 0, runtime = 0;  // CUDA's versions, 1000 * major + 10 * minor
};
DeviceInfo CurrentDeviceInfo();

// A point of a stream's work that the host polls. Tables of one call share one: once it is recorded
// again it is later than the points it stood for, and so still valid for them. Thread-safe.
class StreamPoint {
 public:
  StreamPoint();
  ~StreamPoint();
  StreamPoint(const StreamPoint&) = delete;
  StreamPoint& operator=(const StreamPoint&) = delete;

  void Record(Stream stream);
  // Asks the driver at most once per round (NextRound), and no more once the point has passed.
  bool HasPassed(uint64_t round);
  void Wait();
  static uint64_t NextRound();

 private:
  const int device_;
  std::mutex mutex_;
  Event event_ = nullptr;
  bool has_passed_ = true;
  uint64_t asked_in_ = 0;
};

// A point of a stream's work, with the time at which the device reaches it.
class TimedEvent {
 public:
  TimedEvent();
  ~TimedEvent();
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  void Record(Stream stream);
  double SecondsSince(const TimedEvent& earlier) const;  // waits for both

 private:
  const int device_;
  Event event_ = nullptr;
};

// A piece of device memory, freed in the order of the stream it was allocated on.
class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, Stream stream);  // throws DeviceMemoryError
  ~Buffer() { Free(); }
  Buffer(Buffer&& other) noexcept { Swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void Zero();  // async
  // Frees it in the order of `stream` instead, which the caller has ordered after the old one.
  void MoveTo(Stream stream) { stream_ = stream; }
  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }
  int device() const { return device_; }
  Stream stream() const { return stream_; }

 private:
  void Free() noexcept;
  void Swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(stream_, other.stream_);
    std::swap(device_, other.device_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  Stream stream_ = nullptr;
  int device_ = 0;
};

// Scratch for one call after another on one stream: each call takes pieces, a Scope gives them all
// back. Pieces are reused in the order of the stream, so nothing waits.
class Workspace {
 public:
  // Scopes nest. The end of the outermost one gives all pieces back.
  class Scope {
   public:
    Scope(Workspace& workspace, Stream stream) : workspace_(workspace) {
      if (workspace_.depth_ == 0) workspace_.Reset(stream);  // may throw
      ++workspace_.depth_;
    }
    ~Scope() { --workspace_.depth_; }
    Scope(const Scope&) = delete;

   private:
    Workspace& workspace_;
  };

  // `count` elements, 256-byte aligned, with undefined content; valid until the outermost Scope
  // ends. Never null.
  template <typename T>
  T* Take(int64_t count) {
    return static_cast<T*>(TakeBytes(static_cast<size_t>(count < 1 ? 1 : count) * sizeof(T)));
  }

 private:
  void* TakeBytes(size_t bytes);
  void Reset(Stream stream);  // one block of the size that the last calls needed

  std::vector<Buffer> blocks_;
  size_t used_ = 0;   // of the last block
  size_t total_ = 0;  // taken since Reset
  Stream stream_ = nullptr;
  int device_ = 0;
  int depth_ = 0;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_DEVICE_H_
