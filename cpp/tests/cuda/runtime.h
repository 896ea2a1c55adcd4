// What the tests of this folder run on: the emulator, or with SOK_TESTS_ON_DEVICE a device.
//
// Most tests give the backend plain vectors. The emulator allows it where host_arrays_allowed is
// set, and finishes each call before it returns where runs_at_once is. On a device the same two
// lines put what operator new returns into pinned memory, which kernels reach, and make each launch
// of a kernel wait (CUDA_LAUNCH_BLOCKING). Fills and copies do not: a test waits for these. A test
// that sets neither has streams that run late. An array of the device must not be on the stack.
//
// Invariant: a test of what only the emulator counts or pretends (launches, waits, a lack of
// memory, a second device) passes on a device: counts equal all numbers there (`Uncounted`), or the
// test asks `kEmulated`.
#ifndef SOK_TESTS_CUDA_RUNTIME_H_
#define SOK_TESTS_CUDA_RUNTIME_H_

#ifndef SOK_TESTS_ON_DEVICE

#include "cpp/tests/emulator/cuda_runtime.h"

namespace emulator {

inline constexpr bool kEmulated = true;

// The default stream for 0, else one that the default stream does not wait for.
inline cudaStream_t StreamOfNumber(int number) {
  return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(0x100 * number));
}

}  // namespace emulator

#else  // SOK_TESTS_ON_DEVICE

#include <cuda_runtime_api.h>

#include <cstdint>

namespace emulator {

inline constexpr bool kEmulated = false;

struct Uncounted {
  operator int64_t() const { return 0; }
};
template <typename T>
bool operator==(Uncounted, T) {
  return true;
}
template <typename T>
bool operator<=(Uncounted, T) {
  return true;
}
template <typename T>
Uncounted operator-(Uncounted, T) {
  return {};
}

inline constexpr Uncounted bytes_allocated, num_allocations, num_host_waits, num_event_calls,
    num_launches;
inline int driver_version, forbidden_device, current_device;  // read by no test on a device
inline int64_t allocations_left;
inline bool has_context = false;
inline constexpr unsigned first_seed = 1;

// What setting host_arrays_allowed or runs_at_once does.
struct Setting {
  void (*set)();
  bool operator=(bool on) const {  // NOLINT: as of a bool, so that two can be set in a line
    if (on) set();
    return on;
  }
};
void PinWhatNewReturns();
void WaitForEachLaunch();
inline constexpr Setting host_arrays_allowed{PinWhatNewReturns}, runs_at_once{WaitForEachLaunch};

cudaStream_t StreamOfNumber(int number);

struct Streams {
  static Streams Get() { return {}; }
  void FinishAll() const { cudaDeviceSynchronize(); }
};

}  // namespace emulator

#endif  // SOK_TESTS_ON_DEVICE
#endif  // SOK_TESTS_CUDA_RUNTIME_H_
