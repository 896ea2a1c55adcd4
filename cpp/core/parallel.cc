#include "cpp/core/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace sok {
namespace {

// More ranges than threads, so that the others take over the share of a thread that is delayed.
constexpr int64_t kRangesPerThread = 4;

thread_local int ranges = 0;        // that this thread is in
thread_local int leaf_mutexes = 0;  // that it holds

}  // namespace

void CheckMayWaitForPool() {
  if (ranges > 0) throw std::logic_error("A range of ParallelFor must not wait for a pool itself");
  if (leaf_mutexes > 0) throw std::logic_error("A LeafMutex must not be held while a pool works");
}

void CheckMayTakeTableLock() {
  if (ranges > 0) throw std::logic_error("A range of ParallelFor must not take a table's lock");
}

InRange::InRange() { ++ranges; }
InRange::~InRange() { --ranges; }

void LeafMutex::lock() {
  mutex_.lock();
  ++leaf_mutexes;
}

void LeafMutex::unlock() {
  --leaf_mutexes;
  mutex_.unlock();
}

// A call is a `Job` on its caller's stack. Threads join it while it is listed, claim ranges from
// its counter and leave; the caller takes it off the list and waits until the last one has left.
struct ThreadPool::Impl {
  struct Job {
    const RangeFunction* fn;
    int64_t n;
    int64_t range;  // indices per range
    int64_t num_ranges;
    std::atomic<int64_t> next{0};
    int inside = 0;  // threads in it, not counting the caller; guarded by Impl::mutex
    std::condition_variable left;
    std::exception_ptr error;  // of range `error_range`; both guarded by Impl::mutex
    int64_t error_range = 0;
    Job* following = nullptr;  // in the list
  };

  std::mutex mutex;
  std::condition_variable wake;
  Job* jobs = nullptr;  // newest first; adding a job cannot fail
  bool stopping = false;
  std::vector<std::thread> threads;

  void RunRanges(Job* job) {
    const InRange in_range;
    for (;;) {
      const int64_t i = job->next.fetch_add(1, std::memory_order_relaxed);
      if (i >= job->num_ranges) return;
      try {
        (*job->fn)(i * job->range, std::min(job->n, (i + 1) * job->range));
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!job->error || i < job->error_range) {
          job->error = std::current_exception();
          job->error_range = i;
        }
      }
    }
  }

  void Unlist(Job* job) {
    for (Job** link = &jobs; *link != nullptr; link = &(*link)->following) {
      if (*link != job) continue;
      *link = job->following;
      return;
    }
  }

  void Work() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      wake.wait(lock, [this] { return stopping || jobs != nullptr; });
      if (jobs == nullptr) return;
      Job* job = jobs;
      ++job->inside;
      lock.unlock();
      RunRanges(job);
      lock.lock();
      Unlist(job);  // all its ranges are taken
      if (--job->inside == 0) job->left.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(new Impl) {
  if (num_threads < 1) {
    throw std::invalid_argument("`num_threads` must be positive. Received: " +
                                std::to_string(num_threads));
  }
  for (int i = 1; i < num_threads; ++i) impl_->threads.emplace_back([this] { impl_->Work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

int ThreadPool::num_threads() const { return static_cast<int>(impl_->threads.size()) + 1; }

void ThreadPool::ParallelFor(int64_t n, int64_t grain, RangeFunction fn) {
  CheckMayWaitForPool();
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t most = n / grain;  // ranges of at least `grain`
  if (most <= 1 || impl_->threads.empty()) {
    const InRange in_range;
    fn(0, n);
    return;
  }
  Impl::Job job;
  job.fn = &fn;
  job.n = n;
  const int64_t wanted = std::min(most, num_threads() * kRangesPerThread);
  job.range = (n + wanted - 1) / wanted;
  job.num_ranges = (n + job.range - 1) / job.range;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    job.following = impl_->jobs;
    impl_->jobs = &job;
  }
  const int64_t useful = std::min<int64_t>(job.num_ranges - 1, num_threads() - 1);
  for (int64_t i = 0; i < useful; ++i) impl_->wake.notify_one();
  impl_->RunRanges(&job);
  std::unique_lock<std::mutex> lock(impl_->mutex);
  impl_->Unlist(&job);
  job.left.wait(lock, [&job] { return job.inside == 0; });
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace sok
