// Runs kernels on the CPU, so that they can be tested where there is no device.
//
// Every thread of a block is a fiber. One fiber runs at a time; which one goes on is drawn at
// random whenever one waits: at a collective of its tile until all lanes of it have come, and now
// and then before an atomic operation, so that threads interleave there as they may on a device.
// The fibers of a few blocks run together.
//
// What it finds: wrong indices, races between atomic steps, collectives that not all lanes reach
// (the run ends with a message), and reads that need an order they do not ask for (weak_memory.h).
// What it cannot find: hardware's own behaviour.
// A fiber is started once and serves one thread after another. Switching is by _longjmp, which
// unlike swapcontext makes no system call.
//
// Shared memory is rubbish when a block begins; its atomics are seen at once. A barrier ends the
// program if a thread of the block has ended or ends before all have come.
#ifndef SOK_TESTS_EMULATOR_FIBERS_H_
#define SOK_TESTS_EMULATOR_FIBERS_H_

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cpp/tests/emulator/device_memory.h"
#include "cpp/tests/emulator/weak_memory.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT
};
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace emulator {

inline constexpr size_t kStackBytes = size_t{128} << 10;
inline constexpr int64_t kMaxIdleSwitches = 20'000'000;
inline constexpr size_t kSharedBytes = size_t{48} << 10;  // of a block, on all devices

// What the lanes of one tile exchange in one collective.
struct Tile {
  int arrived = 0;
  uint64_t turn = 0;
  uint64_t deposits[32];
  uint64_t results[32];
};

// What threads of a warp that run together exchange.
struct Gathering {
  unsigned size = 1;
  bool closed = false;
  std::vector<uint64_t> words;
};

struct Block {
  Tile barrier;
  unsigned num_done = 0;
  size_t shared_bytes = 0;
  std::map<const void*, std::vector<char>> shared;
};

struct Fiber {
  jmp_buf place;  // where it goes on
  std::unique_ptr<char[]> stack;
  uint3 thread, block;
  View view;
  bool done = false;
};

class Scheduler {
 public:
  static Scheduler& Get() {
    static Scheduler scheduler;
    return scheduler;
  }

  // Runs body() once for every thread of `num_blocks` blocks from `first_block` on.
  void Run(unsigned first_block, unsigned num_blocks, unsigned num_threads,
           const std::function<void()>& body) {
    body_ = &body;
    tiles_.clear();
    gatherings_.clear();
    blocks_.clear();
    const size_t total = size_t{num_blocks} * num_threads;
    while (fibers_.size() < total) fibers_.push_back(std::make_unique<Fiber>());
    std::vector<Fiber*> running;
    for (size_t i = 0; i < total; ++i) {
      Fiber& fiber = *fibers_[i];
      fiber.done = false;
      fiber.view.Clear();
      fiber.thread = {static_cast<unsigned>(i % num_threads), 0, 0};
      fiber.block = {static_cast<unsigned>(first_block + i / num_threads), 0, 0};
      running.push_back(&fiber);
    }
    idle_switches_ = 0;
    while (!running.empty()) {
      const size_t pick = random_bits() % running.size();
      current_ = running[pick];
      threadIdx = current_->thread;
      blockIdx = current_->block;
      Resume();
      if (current_->done) {
        const Block& block = blocks_[blockIdx.x];
        if (block.barrier.arrived > 0) Fail("a thread has ended and others wait at a barrier");
        ++blocks_[blockIdx.x].num_done;
        running[pick] = running.back();
        running.pop_back();
        idle_switches_ = 0;
      } else if (++idle_switches_ > kMaxIdleSwitches) {
        Fail(std::to_string(running.size()) + " threads wait for each other");
      }
    }
    current_ = nullptr;
  }

  std::shared_ptr<Gathering>& GatheringOfWarp() {
    return gatherings_[{blockIdx.x, threadIdx.x / 32}];
  }

  // All threads of the block, none of which may have ended. What it wrote is seen behind it.
  void Barrier() {
    Block& block = blocks_[blockIdx.x];
    if (block.num_done > 0) Fail("a thread has ended and others wait at a barrier");
    const uint64_t turn = block.barrier.turn;
    if (++block.barrier.arrived == static_cast<int>(blockDim.x)) {
      block.barrier.arrived = 0;
      ++block.barrier.turn;
      idle_switches_ = 0;
    } else {
      while (block.barrier.turn == turn) Yield();
    }
    CurrentView().all = WeakMemory::Get().last_number();
  }

  // An array that the threads of the running block share. `site`: which one of the kernel's.
  void* Shared(const void* site, size_t bytes) {
    std::vector<char>& array = blocks_[blockIdx.x].shared[site];
    if (array.empty()) {
      if ((blocks_[blockIdx.x].shared_bytes += bytes) > kSharedBytes) {
        Fail("a block has more than 48 KiB of shared memory");
      }
      array.assign(bytes, static_cast<char>(0xA5));
    }
    return array.data();
  }
  bool IsShared(const void* pointer) {
    if (current_ == nullptr || DeviceMemory::Get().Holds(pointer)) return false;
    for (const auto& [site, array] : blocks_[blockIdx.x].shared) {
      if (pointer >= array.data() && pointer < array.data() + array.size()) return true;
    }
    return false;
  }

  // Of the running thread.
  View& CurrentView() { return current_->view; }

  void Yield() {
    if (_setjmp(current_->place) == 0) _longjmp(main_, 1);
  }
  void MaybeYield() {
    if (current_ != nullptr && random_bits() % 4 == 0) Yield();
  }

  // All lanes of the tile hand in a value and get the values of all.
  const uint64_t* Exchange(int size, uint64_t value) {
    Tile& tile = tiles_[{blockIdx.x, threadIdx.x / size * 64 + size}];
    const uint64_t turn = tile.turn;
    tile.deposits[threadIdx.x % size] = value;
    if (++tile.arrived == size) {
      for (int i = 0; i < size; ++i) tile.results[i] = tile.deposits[i];
      tile.arrived = 0;
      ++tile.turn;
      idle_switches_ = 0;
    } else {
      while (tile.turn == turn) Yield();
    }
    return tile.results;
  }

 private:
  void Resume() {
    if (_setjmp(main_) != 0) return;  // back from the fiber
    if (current_->stack != nullptr) _longjmp(current_->place, 1);
    current_->stack.reset(new char[kStackBytes]);
    static ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = current_->stack.get();
    start.uc_stack.ss_size = kStackBytes;
    start.uc_link = nullptr;
    makecontext(&start, &Scheduler::Enter, 0);
    setcontext(&start);
  }

  static void Enter() {
    Scheduler& self = Get();
    for (;;) {
      (*self.body_)();
      self.current_->done = true;
      self.Yield();  // until it is another thread's turn to be this fiber
    }
  }

  const std::function<void()>* body_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::map<std::pair<unsigned, unsigned>, Tile> tiles_;
  std::map<std::pair<unsigned, unsigned>, std::shared_ptr<Gathering>> gatherings_;
  std::map<unsigned, Block> blocks_;
  Fiber* current_ = nullptr;
  jmp_buf main_;
  int64_t idle_switches_ = 0;
};

}  // namespace emulator

#endif  // SOK_TESTS_EMULATOR_FIBERS_H_
