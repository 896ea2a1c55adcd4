// Threads that call a device table without a pause let each other in, in the order in which they
// came; the holder's calls come first.
#include "cpp/core/cuda/table/held_mutex.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace cuda {
namespace {

void NobodyOvertakes() {
  HeldMutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  mutex.lock();
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::lock_guard<HeldMutex> lock(mutex);
      order.push_back(t);
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it waits by now
  }
  mutex.unlock();
  mutex.lock();  // without a pause, behind those that have waited
  order.push_back(4);
  mutex.unlock();
  for (std::thread& thread : threads) thread.join();
  CHECK((order == std::vector<int>{0, 1, 2, 3, 4}));
}

void TheHolderComesFirst() {
  HeldMutex mutex;
  std::atomic<int> inside{0};
  mutex.lock();
  mutex.lock();  // again, from the same thread
  std::thread other([&] {
    const std::lock_guard<HeldMutex> lock(mutex);
    inside = 1;
  });
  mutex.Hold();
  mutex.unlock();
  mutex.unlock();
  for (int call = 0; call < 20; ++call) {
    mutex.LockHeld();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK_EQ(inside.load(), 0);
    mutex.unlock();
  }
  mutex.Release();
  other.join();
  CHECK_EQ(inside.load(), 1);
}

}  // namespace
}  // namespace cuda
}  // namespace sok

int main() {
  sok::cuda::NobodyOvertakes();
  sok::cuda::TheHolderComesFirst();
}
