// The emulator itself: each mistake that it is there to find is made, in a process of its own, and
// must end that process with the message or show as a wrong result. The same without the mistake
// must pass.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cuda/atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cpp/core/cuda/device/device.h"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/device_array.h"

namespace sok {
namespace {

using cuda::Buffer;
using cuda::Launch;
using cuda::Stream;

const Stream kFirst = reinterpret_cast<Stream>(0x100), kSecond = reinterpret_cast<Stream>(0x200);

struct Outcome {
  bool ended_well;
  std::string said;
};

// Runs it in a process of its own, with chances of its own.
Outcome Run(const std::function<bool()>& is_right, unsigned seed) {
  std::array<int, 2> ends;
  CHECK_EQ(pipe(ends.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], 2);
    emulator::random_bits.seed(seed);
    const bool right = is_right();
    std::fputs(right ? "right" : "wrong", stderr);
    _exit(0);
  }
  close(ends[1]);
  Outcome outcome = {};
  std::array<char, 256> piece;
  for (ssize_t n; (n = read(ends[0], piece.data(), piece.size())) > 0;) {
    outcome.said.append(piece.data(), n);
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  // A sanitizer may have said before that it does not know fibers.
  const size_t end = outcome.said.rfind("right");
  outcome.ended_well =
      WIFEXITED(status) && end != std::string::npos && end + 5 == outcome.said.size();
  return outcome;
}

// `program(planted)`: whether its result is right. `text`: what is said of the mistake.
void Finds(const char* what, const std::function<bool(bool)>& program, const char* text) {
  int found = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    const Outcome good = Run([&] { return program(false); }, seed);
    if (!good.ended_well) {
      CheckFailed(__FILE__, __LINE__, std::string(what) + " without the mistake: " + good.said);
    }
    const Outcome bad = Run([&] { return program(true); }, seed);
    if (bad.ended_well) continue;
    ++found;
    if (bad.said.find(text) == std::string::npos) {
      CheckFailed(__FILE__, __LINE__, std::string(what) + " said: " + bad.said);
    }
  }
  std::printf("%-40s found with %2d of 20 seeds\n", what, found);
  CHECK(found >= 2);
}

// ---- memory ----

void AddOneKernel(uint32_t* values, int64_t count) {
  const int64_t i = cuda::GlobalThread();
  if (i < count) values[i] += 1;
}

bool HostPointer(bool planted) {
  std::vector<uint32_t> host(300, 1);
  const DeviceArray<uint32_t> device(host, kFirst);
  Launch(AddOneKernel, 300, kFirst, planted ? host.data() : device, int64_t{300});
  return device.Get() == std::vector<uint32_t>(300, 2);
}

bool DevicePointerOnTheHost(bool planted) {
  const DeviceArray<uint32_t> device({1, 2, 3}, kFirst);
  const uint32_t* const values = device;
  return (planted ? values[1] : device.Get()[1]) == 2;
}

bool CopyInTheWrongDirection(bool planted) {
  const DeviceArray<uint32_t> device({1, 2, 3}, kFirst);
  uint32_t value = 0;
  if (planted) {
    cuda::CopyOnDevice(kFirst, &value, device, sizeof(value));
    cuda::Synchronize(kFirst);
  } else {
    cuda::CopyToHost(kFirst, &value, device, sizeof(value));
  }
  return value == 1;
}

bool FreedScratch(bool planted) {
  Buffer scratch(300 * sizeof(uint32_t), kFirst);
  scratch.Zero();
  uint32_t* const values = scratch.as<uint32_t>();
  if (planted) scratch = Buffer();
  Launch(AddOneKernel, 300, kFirst, values, int64_t{300});
  cuda::Synchronize(kFirst);
  return true;
}

void WriteBehindKernel(uint8_t* values, int64_t at) {
  if (cuda::GlobalThread() == 0) values[at] = 1;
}

bool BeyondTheEnd(bool planted) {
  {
    const Buffer buffer(100, kFirst);
    Launch(WriteBehindKernel, 1, kFirst, buffer.as<uint8_t>(), int64_t{planted ? 100 : 99});
  }
  cuda::Synchronize(kFirst);
  return true;
}

// ---- streams ----

bool EventWait(bool planted) {
  const DeviceArray<uint32_t> values(300, 0u, kFirst);
  cuda::OrderAfter(kSecond, kFirst);
  for (int i = 0; i < 20; ++i) Launch(AddOneKernel, 300, kFirst, values, int64_t{300});
  if (!planted) cuda::OrderAfter(kSecond, kFirst);
  uint32_t value = 0;
  cuda::CopyToHost(kSecond, &value, values, sizeof(value));
  return value == 20;
}

bool FreedOnTheWrongStream(bool planted) {
  Buffer values(300 * sizeof(uint32_t), kFirst);
  values.Zero();
  if (planted) values.MoveTo(kSecond);
  for (int i = 0; i < 20; ++i) {
    Launch(AddOneKernel, 300, kFirst, values.as<uint32_t>(), int64_t{300});
  }
  values = Buffer();
  cuda::Synchronize(kSecond);
  cuda::Synchronize(kFirst);
  return true;
}

bool UsedOnTheWrongStream(bool planted) {
  const Buffer values(300 * sizeof(uint32_t), kFirst);
  if (!planted) cuda::OrderAfter(kSecond, kFirst);
  cuda::FillWithZeros(kSecond, values.data(), values.bytes());
  cuda::Synchronize(kSecond);
  return true;
}

bool ResultReadTooEarly(bool planted) {
  const DeviceArray<uint32_t> values({7}, kFirst);
  void* pinned = nullptr;
  cudaMallocHost(&pinned, sizeof(uint32_t));
  auto* const copy = static_cast<uint32_t*>(pinned);
  *copy = 0;
  cudaMemcpyAsync(copy, values, sizeof(*copy), cudaMemcpyDeviceToHost, kFirst);
  if (!planted) cuda::Synchronize(kFirst);
  return *copy == 7;
}

bool OldEvent(bool planted) {  // recorded before the work that it stands for
  const DeviceArray<uint32_t> values(300, 0u, kFirst);
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (planted) cudaEventRecord(event, kFirst);
  for (int i = 0; i < 20; ++i) Launch(AddOneKernel, 300, kFirst, values, int64_t{300});
  if (!planted) cudaEventRecord(event, kFirst);
  cudaStreamWaitEvent(kSecond, event);
  uint32_t value = 0;
  cuda::CopyToHost(kSecond, &value, values, sizeof(value));
  return value == 20;
}

bool ContextOnAnUnusedDevice(bool planted) {  // a thread "restores" the device 0 that it never had
  cudaSetDevice(1);
  emulator::forbidden_device = 0;
  std::thread([planted] {
    int before = 0;
    cudaGetDevice(&before);
    if (planted) {
      cudaSetDevice(1);
      cudaSetDevice(before);
    } else {
      const cuda::DeviceScope scope(1);
    }
  }).join();
  return true;
}

// ---- threads ----

// Sums of blocks, by way of shared memory.
void SumKernel(const uint32_t* values, uint32_t* sums, bool first_barrier, bool second_barrier) {
  SOK_SHARED(uint32_t, sum, 1);
  if (threadIdx.x == 0) *sum = 0;
  if (first_barrier) __syncthreads();
  atomicAdd(sum, values[cuda::GlobalThread()]);
  if (second_barrier) __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = *sum;
}

bool Barriers(bool first, bool second) {
  const DeviceArray<uint32_t> values(3 * cuda::kThreads, 2u, kFirst);
  const DeviceArray<uint32_t> sums(3, 0u, kFirst);
  Launch(SumKernel, 3 * cuda::kThreads, kFirst, values, sums, first, second);
  return sums.Get() == std::vector<uint32_t>(3, 2 * cuda::kThreads);
}

void LeavingKernel(bool leaves) {
  if (leaves && threadIdx.x == 5) return;
  __syncthreads();
}

bool BarrierThatOneThreadMisses(bool planted) {
  Launch(LeavingKernel, cuda::kThreads, kFirst, planted);
  cuda::Synchronize(kFirst);
  return true;
}

// Hands a value over behind a flag.
void HandOverKernel(uint32_t* words, bool releases, bool acquires, uint32_t* out) {
  using Word = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>;
  if (cuda::GlobalThread() == 0) {
    Word(words[0]).store(42, ::cuda::memory_order_relaxed);
    Word(words[1]).store(1, releases ? ::cuda::memory_order_release : ::cuda::memory_order_relaxed);
  } else if (cuda::GlobalThread() == 33) {
    while (Word(words[1]).load(acquires ? ::cuda::memory_order_acquire
                                        : ::cuda::memory_order_relaxed) == 0) {
    }
    *out = Word(words[0]).load(::cuda::memory_order_relaxed);
  }
}

bool HandOver(bool releases, bool acquires) {
  const DeviceArray<uint32_t> words(2, 0u, kFirst), out(1, 0u, kFirst);
  Launch(HandOverKernel, cuda::kThreads, kFirst, words, releases, acquires, out);
  return out.Get()[0] == 42;
}

}  // namespace
}  // namespace sok

int main() {
  using namespace sok;  // NOLINT
  Finds("host pointer in a kernel", HostPointer, "a pointer to host memory");
  Finds("device pointer on the host", DevicePointerOnTheHost, "the host touches device memory");
  Finds("copy in the wrong direction", CopyInTheWrongDirection, "a host pointer for device memory");
  Finds("freed scratch", FreedScratch, "has been freed");
  Finds("write beyond the end", BeyondTheEnd, "behind the end of a block");
  Finds("missing event wait", EventWait, "wrong");
  Finds("event recorded too early", OldEvent, "wrong");
  Finds("freed on the wrong stream", FreedOnTheWrongStream, "");
  Finds("used on the wrong stream", UsedOnTheWrongStream, "before it is allocated");
  Finds("result read too early", ResultReadTooEarly, "wrong");
  Finds("context on an unused device", ContextOnAnUnusedDevice, "a context is made on device 0");
  Finds("missing first barrier", [](bool planted) { return Barriers(!planted, true); }, "wrong");
  Finds("missing second barrier", [](bool planted) { return Barriers(true, !planted); }, "wrong");
  Finds("barrier that a thread misses", BarrierThatOneThreadMisses, "wait at a barrier");
  Finds("missing release", [](bool planted) { return HandOver(!planted, true); }, "wrong");
  Finds("missing acquire", [](bool planted) { return HandOver(true, !planted); }, "wrong");
  return 0;
}
