// Jobs: the same work for many tables, in one launch.
//
//     job           0              1        2          three tables, of 700, 20 and 300 threads
//     block         0   1   2      3        4   5      whole blocks: a block has one job
//     first_block   0              3        4
//
// A job is a struct of what one table needs, with `NumThreads()` for the host and `Run(thread)` for
// the device. Jobs are passed as the kernel's argument, so nothing is copied to the device before
// and nothing waits. Of each kind of job there are three kernels:
//
//     one job                                fields at fixed places
//     few     in 4 KiB of arguments          what all toolkits and drivers allow: 13 with a table
//     many    in 16 KiB, 64 at most          toolkits since CUDA 12.1, with drivers since 530
//
// CUDA 12.1 allows 32,764 bytes, but each launch copies all of its kernel's arguments, used or not.
// An older driver, or toolkit, makes one launch for each few jobs.
//
// Invariant: jobs of one launch run concurrently, in no order: none may read what another writes.
#ifndef SOK_CORE_CUDA_DEVICE_JOBS_CUH_
#define SOK_CORE_CUDA_DEVICE_JOBS_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpp/core/cuda/device/launch.cuh"

namespace sok {
namespace cuda {

// Blocks that a multiprocessor should hold: `kMinBlocks` of a job. By itself, ptxas would spill
// registers of such a job rather than hold one block less. 0: ptxas decides.
template <typename Job, typename = void>
struct MinBlocks {
  static constexpr int value = 0;
};
template <typename Job>
struct MinBlocks<Job, std::void_t<decltype(Job::kMinBlocks)>> {
  static constexpr int value = Job::kMinBlocks;
};

inline constexpr int kFewBytes = 4096;
#if defined(CUDART_VERSION) && CUDART_VERSION >= 12010
inline constexpr int kManyBytes = 16384;
#else
inline constexpr int kManyBytes = kFewBytes;
#endif

// At most `kMost` jobs within `kBytes` of arguments.
template <typename Job, int kBytes>
struct Jobs {
  static constexpr int kForJobs = kBytes - 2 * sizeof(uint64_t);  // without `count`, padding
  static constexpr int kMost = std::min<int>(64, kForJobs / (sizeof(Job) + sizeof(uint32_t)));
  static_assert(kMost >= 2, "a job must leave room for another in a kernel's arguments");

  Job job[kMost];
  uint32_t first_block[kMost];
  int count;
};

template <typename Job>
__global__ void __launch_bounds__(kThreads, MinBlocks<Job>::value) OneJobKernel(const Job job) {
  job.Run(GlobalThread());
}

template <typename Job, int kBytes>
__global__ void __launch_bounds__(kThreads, MinBlocks<Job>::value)
    JobsKernel(const __grid_constant__ Jobs<Job, kBytes> jobs) {
  int low = 0, high = jobs.count;  // the last job that begins at or before this block
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (jobs.first_block[middle] <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const uint32_t block = blockIdx.x - jobs.first_block[low];
  jobs.job[low].Run(static_cast<int64_t>(block) * kThreads + static_cast<int64_t>(threadIdx.x));
}

inline bool DriverTakesManyArguments() {
  int version = 0;
  CudaCheck(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return version >= 12010;
}

// LaunchJobs with up to `kBytes` of arguments per launch.
template <int kBytes, typename Job>
void LaunchJobsIn(Stream stream, const std::vector<Job>& jobs) {
  static_assert(sizeof(Jobs<Job, kBytes>) <= kBytes && std::is_trivially_copyable_v<Job>);
  Jobs<Job, kBytes> together;
  together.count = 0;
  int64_t num_blocks = 0;
  const auto flush = [&] {
    if (together.count == 1) {
      Launch(OneJobKernel<Job>, num_blocks * kThreads, stream, together.job[0]);
    } else if (together.count > 1) {
      Launch(JobsKernel<Job, kBytes>, num_blocks * kThreads, stream, together);
    }
    together.count = 0;
    num_blocks = 0;
  };
  for (const Job& job : jobs) {
    const int64_t num_threads = job.NumThreads();
    if (num_threads <= 0) continue;
    const int64_t blocks = (num_threads + kThreads - 1) / kThreads;
    if (together.count == Jobs<Job, kBytes>::kMost || num_blocks + blocks > INT32_MAX) flush();
    together.job[together.count] = job;
    together.first_block[together.count++] = static_cast<uint32_t>(num_blocks);
    num_blocks += blocks;
  }
  flush();
}

// Runs all jobs, in as few launches as possible. Does not synchronise.
template <typename Job>
void LaunchJobs(Stream stream, const std::vector<Job>& jobs) {
  constexpr int kFew = Jobs<Job, kFewBytes>::kMost;
  constexpr bool kTakesMore = Jobs<Job, kManyBytes>::kMost > kFew;
  if constexpr (kTakesMore) {
    if (jobs.size() > kFew && DriverTakesManyArguments()) {
      return LaunchJobsIn<kManyBytes>(stream, jobs);
    }
  }
  LaunchJobsIn<kFewBytes>(stream, jobs);
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_DEVICE_JOBS_CUH_
