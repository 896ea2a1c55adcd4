// Threads come from the caller.
//
// The core never starts a thread on its own: every batch call takes an `Executor` and asks it to
// run a function over disjoint ranges. TensorFlow's kernels pass its intra-op pool, the Python
// module a small `ThreadPool`, and single-threaded code `InlineExecutor`.
//
// Invariant: results do not depend on how a range is cut. Code that keeps state per range cuts the
// work into a number of parts that depends only on the size of the input, never on `num_threads()`.
#ifndef SOK_CORE_PARALLEL_H_
#define SOK_CORE_PARALLEL_H_

#include <cstdint>
#include <functional>
#include <memory>

namespace sok {

class Executor {
 public:
  virtual ~Executor() = default;

  virtual int num_threads() const = 0;

  // Calls `fn(begin, end)` on disjoint ranges that together cover [0, n), each of at least `grain`
  // indices except the last, and returns when all calls have returned. The calling thread takes
  // part. If calls throw, the exception of the lowest range is rethrown once all have ended.
  virtual void ParallelFor(int64_t n, int64_t grain,
                           const std::function<void(int64_t, int64_t)>& fn) = 0;
};

// Runs everything on the calling thread.
class InlineExecutor final : public Executor {
 public:
  int num_threads() const override { return 1; }
  void ParallelFor(int64_t n, int64_t, const std::function<void(int64_t, int64_t)>& fn) override {
    if (n > 0) fn(0, n);
  }
};

// A fixed set of threads that sleep on a condition variable between calls. They do not spin: a
// spinning barrier is slow on a shared machine. Safe to use from several threads at a time.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_threads);  // >= 1; the calling thread counts as one of them
  ~ThreadPool() override;
  int num_threads() const override;
  void ParallelFor(int64_t n, int64_t grain,
                   const std::function<void(int64_t, int64_t)>& fn) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sok

#endif  // SOK_CORE_PARALLEL_H_
