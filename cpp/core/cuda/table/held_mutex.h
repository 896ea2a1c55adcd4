// HeldMutex: a std::recursive_mutex that can also be held independently of a thread, and released
// from any thread.
//
//     lock()             waits while another thread is inside, and while it is held; threads get in
//                        in the order in which they came, so that nobody waits without bound
//     Hold()             from inside: from now on only LockHeld() gets in
//     LockHeld()         for the holder's calls, from any thread
//     Release()          from any thread
//
// So a TableReader reads part by part, and nothing changes in between. Taken once per batch, never
// per key.
#ifndef SOK_CORE_CUDA_TABLE_HELD_MUTEX_H_
#define SOK_CORE_CUDA_TABLE_HELD_MUTEX_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace sok {
namespace cuda {

class HeldMutex {
 public:
  HeldMutex() = default;
  HeldMutex(const HeldMutex&) = delete;
  HeldMutex& operator=(const HeldMutex&) = delete;

  void lock() { Enter(/*as_holder=*/false); }
  void LockHeld() { Enter(/*as_holder=*/true); }
  void unlock() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ > 0) return;
    inside_ = std::thread::id();
    free_.notify_all();
  }
  void Hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = true;
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = false;
    free_.notify_all();
  }

 private:
  void Enter(bool as_holder) {
    const std::thread::id me = std::this_thread::get_id();
    std::unique_lock<std::mutex> lock(mutex_);
    if (inside_ != me && as_holder) {
      free_.wait(lock, [this] { return depth_ == 0; });
    } else if (inside_ != me) {
      const int64_t turn = last_turn_++;
      free_.wait(lock, [&] { return depth_ == 0 && !held_ && turn == turn_; });
      ++turn_;
    }
    inside_ = me;
    ++depth_;
  }

  std::mutex mutex_;
  std::condition_variable free_;
  std::thread::id inside_;  // the thread that depth_ is of
  int64_t depth_ = 0;
  int64_t turn_ = 0;       // of the thread to get in next
  int64_t last_turn_ = 0;  // given out so far
  bool held_ = false;
};

// Holds several mutexes, which may repeat. One order keeps two calls from waiting for each other.
class HeldMutexes {
 public:
  explicit HeldMutexes(const std::set<HeldMutex*>& mutexes) {
    for (HeldMutex* mutex : mutexes) locks_.emplace_back(*mutex);
  }

 private:
  std::vector<std::unique_lock<HeldMutex>> locks_;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_TABLE_HELD_MUTEX_H_
