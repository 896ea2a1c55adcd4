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

// Any threads that run together make such a group; here each runs alone.
struct coalesced_group {
  static unsigned thread_rank() { return 0; }
  static unsigned size() { return 1; }
  template <typename T>
  T shfl(T value, unsigned) const {
    return value;
  }
};
inline coalesced_group coalesced_threads() { return {}; }

}  // namespace cooperative_groups

#endif  // SOK_TESTS_EMULATOR_COOPERATIVE_GROUPS_H_
