// Threads come from the caller.
//
// The core never starts a thread on its own: every batch call takes an `Executor` and asks it to
// run a function over disjoint ranges. TensorFlow's kernels pass its intra-op pool, the Python
// module a small `ThreadPool`, and single-threaded code `InlineExecutor`.
//
// Invariant: results do not depend on how a range is cut. Code that keeps state per range cuts the
// work into a number of parts that depends only on the size of the input, never on `num_threads()`.
//
// A pool's threads may all be busy with other calls, and TensorFlow's pool may run every range on
// its own threads while the caller sleeps. So a range must end whatever the other calls do:
//
//     caller      may hold table locks while it waits for its ranges
//     range       takes no table lock, and does not wait for a pool itself
//     LeafMutex   may be taken in a range, so nobody holds one while waiting for a pool
//
// Pools and locks check these rules at every call, whether or not anybody waits at the moment:
// std::logic_error.
#ifndef SOK_CORE_PARALLEL_H_
#define SOK_CORE_PARALLEL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

namespace sok {

// A function that is not owned. Unlike a std::function it takes no memory, so making one cannot fail.
template <typename... Args>
class FunctionRef {
 public:
  template <typename Fn, std::enable_if_t<!std::is_same_v<Fn, FunctionRef>, int> = 0>
  FunctionRef(const Fn& fn)  // implicit, for lambdas
      : fn_(&fn), call_([](const void* function, Args... args) {
          (*static_cast<const Fn*>(function))(static_cast<Args>(args)...);
        }) {}
  void operator()(Args... args) const { call_(fn_, static_cast<Args>(args)...); }

 private:
  const void* fn_;
  void (*call_)(const void*, Args...);
};

using RangeFunction = FunctionRef<int64_t, int64_t>;  // of begin and end

class Executor {
 public:
  virtual ~Executor() = default;

  virtual int num_threads() const = 0;

  // Calls `fn(begin, end)` on disjoint ranges that together cover [0, n), each of at least `grain`
  // indices except the last, and returns when all calls have returned. The calling thread may run
  // all ranges, some or none. If calls throw, the exception of the lowest range is rethrown once
  // all have ended.
  virtual void ParallelFor(int64_t n, int64_t grain, RangeFunction fn) = 0;
};

// Runs everything on the calling thread, so it may be used in a range.
class InlineExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void ParallelFor(int64_t n, int64_t, RangeFunction fn) override {
    if (n > 0) fn(0, n);
  }
};

// A fixed set of threads that sleep on a condition variable between calls. They do not spin: a
// spinning barrier is slow on a shared machine. The calling thread takes part. Safe to use from
// several threads at a time.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_threads);  // >= 1; the calling thread counts as one of them
  ~ThreadPool() override;
  int num_threads() const override;
  void ParallelFor(int64_t n, int64_t grain, RangeFunction fn) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// ---- the rules above ----

// Throws std::logic_error in a range, and while the thread holds a LeafMutex: for a pool.
void CheckMayWaitForPool();
// Throws std::logic_error in a range: for a lock that is held while a pool works.
void CheckMayTakeTableLock();

// Exists in a thread while it runs a range of a pool.
class InRange {
 public:
  InRange();
  ~InRange();
  InRange(const InRange&) = delete;
  InRange& operator=(const InRange&) = delete;
};

// A std::mutex that may be taken in a range.
class LeafMutex {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;
};

}  // namespace sok

#endif  // SOK_CORE_PARALLEL_H_
