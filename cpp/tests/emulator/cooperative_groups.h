// Tiles of a block and groups of the threads that happen to run together.
#ifndef SOK_TESTS_EMULATOR_COOPERATIVE_GROUPS_H_
#define SOK_TESTS_EMULATOR_COOPERATIVE_GROUPS_H_

#include "cpp/tests/emulator/cuda_runtime.h"

namespace cooperative_groups {

struct thread_block {};
inline thread_block this_thread_block() { return {}; }

template <unsigned kSize>
class thread_block_tile {
 public:
  static unsigned thread_rank() { return threadIdx.x % kSize; }
  static unsigned size() { return kSize; }
  void sync() const { emulator::Scheduler::Get().Exchange(kSize, 0); }
  template <typename T>
  T shfl(T value, unsigned rank) const {
    static_assert(sizeof(T) <= 8, "one word");
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = emulator::Scheduler::Get().Exchange(kSize, word)[rank % kSize];
    std::memcpy(&value, &word, sizeof(T));
    return value;
  }
  unsigned ballot(int predicate) const {
    const uint64_t* const all = emulator::Scheduler::Get().Exchange(kSize, predicate != 0);
    unsigned bits = 0;
    for (unsigned i = 0; i < kSize; ++i) bits |= static_cast<unsigned>(all[i]) << i;
    return bits;
  }
  int any(int predicate) const { return ballot(predicate) != 0; }
};

template <unsigned kSize>
thread_block_tile<kSize> tiled_partition(const thread_block&) {
  return {};
}

// Threads of one warp that happen to run together: those that come while the first one waits for a
// moment, in the order in which they come.
class coalesced_group {
 public:
  coalesced_group() {
    auto& scheduler = emulator::Scheduler::Get();
    std::shared_ptr<emulator::Gathering>& open = scheduler.GatheringOfWarp();
    if (open == nullptr || open->closed) {
      gathering_ = open = std::make_shared<emulator::Gathering>();
      for (auto turns = emulator::random_bits() % 40; turns > 0; --turns) scheduler.Yield();
      gathering_->closed = true;
    } else {
      gathering_ = open;
      rank_ = gathering_->size++;
      while (!gathering_->closed) scheduler.Yield();
    }
  }
  unsigned thread_rank() const { return rank_; }
  unsigned size() const { return gathering_->size; }
  // From rank 0, which is all that the backend needs.
  template <typename T>
  T shfl(T value, unsigned rank) const {
    static_assert(sizeof(T) <= 8, "one word");
    if (rank != 0) std::abort();
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    std::vector<uint64_t>& words = gathering_->words;
    if (rank_ == 0) words.push_back(word);
    while (words.size() <= turn_) emulator::Scheduler::Get().Yield();
    std::memcpy(&value, &words[turn_++], sizeof(T));
    return value;
  }

 private:
  std::shared_ptr<emulator::Gathering> gathering_;
  unsigned rank_ = 0;
  mutable size_t turn_ = 0;
};
inline coalesced_group coalesced_threads() { return {}; }

}  // namespace cooperative_groups

#endif  // SOK_TESTS_EMULATOR_COOPERATIVE_GROUPS_H_
