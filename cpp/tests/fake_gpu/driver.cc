// A CUDA driver, runtime and NVML that show TensorFlow one GPU on a machine that has none.
//
//     device memory   pages that the host cannot touch, except while a copy or an emulated kernel runs
//     copies, fills   happen at once
//     streams, events have nothing to do
//     TensorFlow's own kernels   do nothing; their launches are told by name
//
// The kernels of device tables are this project's, under the emulator (op_library.cc). What TensorFlow
// asks for and this file lacks, TensorFlow takes for an error of the driver, where it looks.
//
// One library with the names of all (cmake/fake_gpu.cmake).
#include "cpp/tests/fake_gpu/driver.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kDeviceBytes = size_t{16} << 30;

// CUDA_VISIBLE_DEVICES=-1, as for a program that a test starts.
const bool is_hidden = [] {
  const char* const devices = std::getenv("CUDA_VISIBLE_DEVICES");
  return devices != nullptr && devices[0] == '-';
}();

// Device memory: one range of addresses, given out from its begin and never again.
class Memory {
 public:
  static Memory& Get() {
    static auto* const memory = new Memory;
    return *memory;
  }

  void* Allocate(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    if (rounded > kDeviceBytes - used_ || end_ + rounded > base_ + kReserved) return nullptr;
    char* const block = end_;
    end_ += rounded;
    used_ += rounded;
    blocks_[block] = rounded;
    if (depth_ > 0) mprotect(block, rounded, PROT_READ | PROT_WRITE);
    return block;
  }
  bool Free(void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(static_cast<char*>(pointer));
    if (block == blocks_.end()) return pointer == nullptr;
    used_ -= block->second;
    madvise(block->first, block->second, MADV_DONTNEED);
    mprotect(block->first, block->second, PROT_NONE);
    blocks_.erase(block);
    return true;
  }
  bool Holds(const void* pointer) const { return pointer >= base_ && pointer < base_ + kReserved; }
  bool BlockOf(const void* pointer, char** begin, size_t* bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    if (after == blocks_.begin()) return false;
    --after;
    *begin = after->first;
    *bytes = after->second;
    return pointer < after->first + after->second;
  }
  size_t FreeBytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kDeviceBytes - used_;
  }

  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (depth_++ == 0) ProtectAll(PROT_READ | PROT_WRITE);
  }
  void Close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ == 0) ProtectAll(PROT_NONE);
  }

 private:
  static constexpr size_t kPage = size_t{1} << 12;
  static constexpr size_t kReserved = size_t{1} << 40;  // addresses

  Memory()
      : base_(static_cast<char*>(mmap(nullptr, kReserved, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))),
        end_(base_) {
    if (base_ == MAP_FAILED) std::abort();
  }
  void ProtectAll(int how) {
    for (const auto& [block, bytes] : blocks_) mprotect(block, bytes, how);
  }

  std::mutex mutex_;
  char* const base_;
  char* end_;
  size_t used_ = 0;
  int depth_ = 0;
  std::map<char*, size_t> blocks_;
};

struct OpenMemory {
  OpenMemory() { Memory::Get().Open(); }
  ~OpenMemory() { Memory::Get().Close(); }
};

void* Address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

// Copies say which side is on the device; a pointer of the other kind ends the program.
void RequireDevice(const void* pointer, size_t bytes, bool is_device) {
  if (bytes == 0 || Memory::Get().Holds(pointer) == is_device) return;
  std::fprintf(stderr, "fake GPU: a copy takes %s memory for the %s's\n",
               is_device ? "host" : "device", is_device ? "device" : "host");
  std::abort();
}
CUresult Copy(void* to, bool to_device, const void* from, bool from_device, size_t bytes) {
  RequireDevice(to, bytes, to_device);
  RequireDevice(from, bytes, from_device);
  const OpenMemory open;
  std::memmove(to, from, bytes);
  return CUDA_SUCCESS;
}
template <typename T>
CUresult Fill(CUdeviceptr to, T value, size_t count) {
  RequireDevice(Address(to), count, true);
  const OpenMemory open;
  for (size_t i = 0; i < count; ++i) static_cast<T*>(Address(to))[i] = value;
  return CUDA_SUCCESS;
}

// A handle of something that has nothing to do.
template <typename Handle>
CUresult MakeHandle(Handle* handle) {
  static char memory[16];
  *handle = reinterpret_cast<Handle>(memory);
  return CUDA_SUCCESS;
}

int Attribute(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
      return 0;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return 8;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    default:
      return 1024;
  }
}

// Kernels by what launches them.
std::map<const void*, std::string>& Kernels() {
  static auto* const kernels = new std::map<const void*, std::string>;
  return *kernels;
}
// Many of TensorFlow's ops end the process if a launch fails, so it only seems to succeed.
std::string* launched = new std::string;
std::mutex launched_mutex;
int Launch(const void* kernel) {
  const std::lock_guard<std::mutex> lock(launched_mutex);
  int status;
  const auto known = Kernels().find(kernel);
  if (known == Kernels().end()) {
    *launched += "a kernel without a name\n";
    return CUDA_SUCCESS;
  }
  char* const name = abi::__cxa_demangle(known->second.c_str(), nullptr, nullptr, &status);
  *launched += std::string(name == nullptr ? known->second.c_str() : name) + "\n";
  std::free(name);
  return CUDA_SUCCESS;
}

}  // namespace

EXPORTED void sok_fake_gpu_open() { Memory::Get().Open(); }
EXPORTED void sok_fake_gpu_close() { Memory::Get().Close(); }
EXPORTED const char* sok_fake_gpu_launched() {
  const std::lock_guard<std::mutex> lock(launched_mutex);
  static std::string last;
  last = std::move(*launched);
  launched->clear();
  return last.c_str();
}
EXPORTED bool sok_fake_gpu_holds(const void* pointer) { return Memory::Get().Holds(pointer); }

// ---- the driver ----

EXPORTED CUresult cuInit(unsigned) { return is_hidden ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS; }
EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorName(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_NOT_SUPPORTED ? "not on the fake GPU" : "error of the fake GPU";
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorString(CUresult code, const char** text) {
  return cuGetErrorName(code, text);
}
EXPORTED CUresult cuDeviceGetCount(int* count) {
  *count = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, length, "fake GPU");
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
  *bytes = kDeviceBytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice) {
  std::snprintf(id, length, "0000:01:00.0");
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetUuid(CUuuid* id, CUdevice) {
  std::memset(id, 1, sizeof(*id));
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = Attribute(attribute);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return MakeHandle(context);
}
EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDevicePrimaryCtxSetFlags(CUdevice, unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) { return MakeHandle(context); }
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetDevice(CUdevice* device) { return cuDeviceGet(device, 0); }
EXPORTED CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetApiVersion(CUcontext, unsigned* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = Memory::Get().FreeBytes();
  *total = kDeviceBytes;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  void* const block = Memory::Get().Allocate(bytes);
  *pointer = reinterpret_cast<CUdeviceptr>(block);
  return block == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORTED CUresult cuMemFree(CUdeviceptr pointer) {
  return Memory::Get().Free(Address(pointer)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORTED CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  return cuMemAllocHost(pointer, bytes);
}
EXPORTED CUresult cuMemAllocHost(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *pointer == nullptr ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORTED CUresult cuMemFreeHost(void* pointer) {
  std::free(pointer);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemHostRegister(void*, size_t, unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemHostUnregister(void*) { return CUDA_SUCCESS; }
EXPORTED CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr pointer) {
  char* block;
  if (!Memory::Get().BlockOf(Address(pointer), &block, bytes)) return CUDA_ERROR_NOT_FOUND;
  *begin = reinterpret_cast<CUdeviceptr>(block);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                        CUdeviceptr pointer) {
  const bool is_device = Memory::Get().Holds(Address(pointer));
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *static_cast<unsigned*>(value) = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL && is_device) {
    *static_cast<int*>(value) = 0;
  } else {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
  return Copy(Address(to), true, from, false, bytes);
}
EXPORTED CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
  return Copy(to, false, Address(from), true, bytes);
}
EXPORTED CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream) {
  return Copy(Address(to), true, Address(from), true, bytes);
}
EXPORTED CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  return cuMemcpyHtoDAsync(to, from, bytes, nullptr);
}
EXPORTED CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  return cuMemcpyDtoHAsync(to, from, bytes, nullptr);
}
EXPORTED CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return cuMemcpyDtoDAsync(to, from, bytes, nullptr);
}
EXPORTED CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream) {
  return Fill<unsigned char>(to, value, count);
}
EXPORTED CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream) {
  return Fill<unsigned>(to, value, count);
}
EXPORTED CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t count) {
  return Fill<unsigned char>(to, value, count);
}
EXPORTED CUresult cuMemsetD32(CUdeviceptr to, unsigned value, size_t count) {
  return Fill<unsigned>(to, value, count);
}

EXPORTED CUresult cuStreamCreate(CUstream* stream, unsigned) { return MakeHandle(stream); }
EXPORTED CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  return MakeHandle(stream);
}
EXPORTED CUresult cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuStreamQuery(CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamGetPriority(CUstream, int* priority) {
  *priority = 0;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLaunchHostFunc(CUstream, CUhostFn call, void* data) {
  call(data);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventCreate(CUevent* event, unsigned) { return MakeHandle(event); }
EXPORTED CUresult cuEventDestroy(CUevent) { return CUDA_SUCCESS; }
EXPORTED CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
EXPORTED CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }

// ---- TensorFlow's kernels: known by name ----

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void*) { return MakeHandle(module); }
EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*,
                                     void**) {
  return MakeHandle(module);
}
EXPORTED CUresult cuModuleLoadFatBinary(CUmodule* module, const void*) {
  return MakeHandle(module);
}
EXPORTED CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  auto* const key = new char;
  Kernels()[key] = name;
  *function = reinterpret_cast<CUfunction>(key);
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
  *value = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, unsigned, CUstream, void**, void**) {
  return static_cast<CUresult>(Launch(function));
}

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                     void*, void*, void*, int*) {
  Kernels()[host] = name;
}
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes,
                                                void* stream) {
  *grid = *block = {1, 1, 1};
  *bytes = 0;
  *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t,
                                      cudaStream_t) {
  return static_cast<cudaError_t>(Launch(kernel));
}

// ---- the runtime ----

EXPORTED cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORTED cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
EXPORTED const char* cudaGetErrorString(cudaError_t) { return "not on the fake GPU"; }
EXPORTED const char* cudaGetErrorName(cudaError_t) { return "not on the fake GPU"; }
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaSetDevice(int) { return cudaSuccess; }
// Eigen, in TensorFlow's ops, ignores what these return.
EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                     cudaStream_t) {
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return static_cast<cudaError_t>(Copy(to, to_device, from, from_device, bytes));
}
EXPORTED cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return static_cast<cudaError_t>(
      Fill<unsigned char>(reinterpret_cast<CUdeviceptr>(to), value, bytes));
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = Attribute(attribute);
  return cudaSuccess;
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  properties->totalGlobalMem = kDeviceBytes;
  properties->major = 9;
  properties->multiProcessorCount = 8;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsPerMultiProcessor = 1024;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*,
                                                                            int, size_t, unsigned) {
  *count = 1;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

// ---- NVML: TensorFlow lists no GPU without it ----

EXPORTED int nvmlInit_v2() { return 0; }
EXPORTED const char* nvmlErrorString(int) { return "not on the fake GPU"; }
EXPORTED size_t cudnnGetVersion() { return 90300; }
EXPORTED int cudnnGetProperty(int which, int* value) {
  *value = which == 0 ? 9 : which == 1 ? 3 : 0;
  return 0;
}
