// TableMutex: many readers or one writer, like std::shared_mutex, with two additions.
//
// A writer may become a reader with no other writer in between, and a thread may release what
// another one has locked. So a TableReader can prepare the content as a writer, then read it in
// parts, from any thread, while lookups that change nothing continue.
//
// Nobody waits without bound: new readers wait behind a writer that waits, and a writer that ends
// lets those readers in before the next writer.
//
//     readers   R R R . . . . . . R R . . . .        a waiting writer W stops new readers;
//     writers         W W W W W W     W W W W        they pass before the second writer
//
// While a TableReader holds the lock, new readers do pass: no writer could before it is done, and its own
// thread may be one of them. Otherwise a thread that reads must not lock again.
//
// Taken once per batch, never per key, and never in a range of a pool (parallel.h).
#ifndef SOK_CORE_CPU_TABLE_MUTEX_H_
#define SOK_CORE_CPU_TABLE_MUTEX_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>

#include "cpp/core/parallel.h"

namespace sok {

class TableMutex {
 public:
  TableMutex() = default;
  TableMutex(const TableMutex&) = delete;
  TableMutex& operator=(const TableMutex&) = delete;

  void lock() {
    WaitForRoom();
    LockNow();
  }
  // lock() in two parts. Who locks several tables waits for all of them first: a thread that waits
  // must not hold what the reader of another table's dump needs.
  void WaitForRoom() {
    CheckMayTakeTableLock();
    std::unique_lock<std::mutex> lock(mutex_);
    free_.wait(lock, [this] { return !crowded_; });
  }
  void LockNow() {
    CheckMayTakeTableLock();
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_writers_;
    free_.wait(lock, [this] { return !writing_ && num_readers_ == 0 && num_passes_ == 0; });
    --waiting_writers_;
    writing_ = true;
  }
  void unlock() {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    num_passes_ = waiting_readers_;
    free_.notify_all();
  }
  void lock_shared() {
    CheckMayTakeTableLock();
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_readers_;
    free_.wait(lock, [this] {
      return !writing_ && (waiting_writers_ == 0 || num_passes_ > 0 || num_holders_ > 0);
    });
    --waiting_readers_;
    if (num_passes_ > 0) --num_passes_;
    ++num_readers_;
  }
  void unlock_shared() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--num_readers_ == 0) free_.notify_all();
  }
  // Whether writers wait for the reader of a dump (instant.h) before they ask for the lock.
  void SetCrowded(bool crowded) {
    const std::lock_guard<std::mutex> lock(mutex_);
    crowded_ = crowded;
    free_.notify_all();
  }
  // lock() becomes a read lock that lets other readers pass; Release() ends it.
  void Hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    ++num_holders_;
    ++num_readers_;
    free_.notify_all();
  }
  void Release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    --num_holders_;
    if (--num_readers_ == 0) free_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  int64_t num_readers_ = 0;  // holders included
  int64_t num_holders_ = 0;
  int64_t num_passes_ = 0;  // readers to let in before the next writer
  int64_t waiting_readers_ = 0;
  int64_t waiting_writers_ = 0;
  bool writing_ = false;
  bool crowded_ = false;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_TABLE_MUTEX_H_
