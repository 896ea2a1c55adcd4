// What a process does on the device, by CUPTI: every kernel, copy and memset with its times. Built
// where it runs (run.sh) and loaded by ctypes before the first call of CUDA:
//
//   trace_begin()      drops what was recorded so far
//   trace_write(path)  a line per record: what, begin and end in ns, bytes, name; and returns how
//                      many there are
//
// TensorFlow's own profiler opens CUPTI of CUDA 12 by name; this needs that of the toolkit alone.

#include <cupti.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Record {
  std::string what;
  uint64_t begin, end, bytes;
  std::string name;
};
std::mutex mutex;
std::vector<Record> records;

void CUPTIAPI GiveBuffer(uint8_t** buffer, size_t* size, size_t* max_records) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
  *max_records = 0;
}

std::string Demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = status == 0 ? text : name;
  std::free(text);
  return result;
}

void Keep(const CUpti_Activity& any) {
  if (any.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto& kernel = reinterpret_cast<const CUpti_ActivityKernel10&>(any);
    records.push_back({"kernel", kernel.start, kernel.end, 0, Demangled(kernel.name)});
  } else if (any.kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto& copy = reinterpret_cast<const CUpti_ActivityMemcpy6&>(any);
    const char* way = copy.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_HTOD   ? "to device"
                      : copy.copyKind == CUPTI_ACTIVITY_MEMCPY_KIND_DTOH ? "to host"
                                                                         : "on device";
    records.push_back({"copy", copy.start, copy.end, copy.bytes, way});
  } else if (any.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
    const auto& set = reinterpret_cast<const CUpti_ActivityMemset4&>(any);
    records.push_back({"memset", set.start, set.end, set.bytes, "memset"});
  }
}

void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t size) {
  std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, size, &record) == CUPTI_SUCCESS) Keep(*record);
  std::free(buffer);
}

[[maybe_unused]] const bool started = [] {
  CUptiResult result = cuptiActivityRegisterCallbacks(GiveBuffer, TakeBuffer);
  for (auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                    CUPTI_ACTIVITY_KIND_MEMSET}) {
    if (result == CUPTI_SUCCESS) result = cuptiActivityEnable(kind);
  }
  if (result != CUPTI_SUCCESS) std::fprintf(stderr, "CUPTI's error %d\n", result);
  return true;
}();

}  // namespace

extern "C" void trace_begin() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  std::lock_guard lock(mutex);
  records.clear();
}

extern "C" int trace_write(const char* path) {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  std::lock_guard lock(mutex);
  FILE* file = std::fopen(path, "w");
  if (file == nullptr) return -1;
  for (const Record& r : records) {
    std::fprintf(file, "%s\t%lu\t%lu\t%lu\t%s\n", r.what.c_str(), r.begin, r.end, r.bytes,
                 r.name.c_str());
  }
  std::fclose(file);
  return static_cast<int>(records.size());
}
