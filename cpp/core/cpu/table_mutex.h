// TableMutex: many readers or one writer, like std::shared_mutex, with two additions.
//
// A writer may become a reader with no other writer in between, and a thread may release what
// another one has locked. So a TableReader can prepare the content as a writer, then read it in
// parts, from any thread, while lookups that change nothing continue.
//
// Readers have priority: a writer waits until nobody reads. Taken once per batch, never per key.
#ifndef SOK_CORE_CPU_TABLE_MUTEX_H_
#define SOK_CORE_CPU_TABLE_MUTEX_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

namespace sok {

class TableMutex {
 public:
  TableMutex() = default;
  TableMutex(const TableMutex&) = delete;
  TableMutex& operator=(const TableMutex&) = delete;

  void lock() {
    std::unique_lock<std::mutex> lock(mutex_);
    free_.wait(lock, [this] { return !writing_ && num_readers_ == 0; });
    writing_ = true;
  }
  void unlock() {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    free_.notify_all();
  }
  void lock_shared() {
    std::unique_lock<std::mutex> lock(mutex_);
    free_.wait(lock, [this] { return !writing_; });
    ++num_readers_;
  }
  void unlock_shared() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--num_readers_ == 0) free_.notify_all();
  }
  // lock() becomes lock_shared().
  void Downgrade() {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    ++num_readers_;
    free_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  int64_t num_readers_ = 0;
  bool writing_ = false;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_TABLE_MUTEX_H_
