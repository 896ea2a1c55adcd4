// Streams that run late: work waits in a queue until the host waits for it, or until chance has it
// run, and the queues of several streams go on in random order, within what events demand.
//
//     stream A    kernel 1 | record e | kernel 2
//     stream B    kernel 3 | wait e   | kernel 4        1 before 4; all else in any order
//
// Memory is allocated and freed at its place in a queue (device_memory.h). No stream waits for
// another by itself, the default stream neither.
//
// SOK_EMULATOR_SEED chooses the order, here and among threads of kernels. Where it is set it is
// printed, and any failure tells it.
#ifndef SOK_TESTS_EMULATOR_STREAMS_H_
#define SOK_TESTS_EMULATOR_STREAMS_H_

#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpp/tests/emulator/device_memory.h"
#include "cpp/tests/emulator/weak_memory.h"

namespace emulator {

// Of the whole device: TensorFlow runs ops on several threads, Python may.
inline std::recursive_mutex device_mutex;

inline const bool is_seeded = [] {
  const char* const text = std::getenv("SOK_EMULATOR_SEED");
  if (text == nullptr) return false;
  first_seed = static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  random_bits.seed(first_seed);
  std::fprintf(stderr, "emulator: SOK_EMULATOR_SEED=%u\n", first_seed);
  return true;
}();

class Streams {
 public:
  using Id = const void*;
  struct Point {  // of a stream; events refer to the last one recorded
    bool passed = false;
  };

  static Streams& Get() {
    static auto* const streams = new Streams;
    return *streams;
  }

  void Add(Id stream, std::function<void()> work) {
    QueueOf(stream).push_back({std::move(work), nullptr});
    if (runs_at_once) return FinishAll();
    if (random_bits() % 16 == 0) RunSome();
  }
  std::shared_ptr<Point> Record(Id stream) {
    auto point = std::make_shared<Point>();
    Add(stream, [point] { point->passed = true; });
    return point;
  }
  void WaitFor(Id stream, const std::shared_ptr<Point>& point) {
    QueueOf(stream).push_back({[] {}, point});
  }

  // What the device may do meanwhile.
  void RunSome() {
    auto steps = random_bits() % 8;
    RunUntil([&] { return steps-- == 0 || Runnable().empty(); });
  }
  void Finish(Id stream) {
    const std::deque<Work>& queue = QueueOf(stream);
    RunUntil([&] { return queue.empty(); });
  }
  void Finish(const std::shared_ptr<Point>& point) {
    RunUntil([&] { return point->passed; });
  }
  void FinishAll() {
    RunUntil([&] {
      for (const auto& [stream, queue] : queues_) {
        if (!queue.empty()) return false;
      }
      return true;
    });
  }

 private:
  struct Work {
    std::function<void()> run;
    std::shared_ptr<Point> behind;
  };

  // Stream 1 is another name of the default stream.
  std::deque<Work>& QueueOf(Id stream) {
    return queues_[reinterpret_cast<uintptr_t>(stream) == 1 ? nullptr : stream];
  }

  std::vector<std::deque<Work>*> Runnable() {
    std::vector<std::deque<Work>*> runnable;
    for (auto& [stream, queue] : queues_) {
      if (queue.empty()) continue;
      const auto& behind = queue.front().behind;
      if (behind == nullptr || behind->passed) runnable.push_back(&queue);
    }
    return runnable;
  }

  template <typename F>
  void RunUntil(const F& is_done) {
    if (is_done()) return;
    DeviceMemory::Get().Open();
    do {
      const auto runnable = Runnable();
      if (runnable.empty()) Fail("streams wait for each other");
      std::deque<Work>& queue = *runnable[random_bits() % runnable.size()];
      const std::function<void()> run = std::move(queue.front().run);
      queue.pop_front();
      run();
    } while (!is_done());
    DeviceMemory::Get().Close();
  }

  std::map<Id, std::deque<Work>> queues_;
};

}  // namespace emulator

#endif  // SOK_TESTS_EMULATOR_STREAMS_H_
