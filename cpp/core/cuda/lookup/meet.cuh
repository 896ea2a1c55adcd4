// Equal keys of a batch meet in one slot of a hash table of positions (unique.h): the first kernel of
// all that make keys unique.
#ifndef SOK_CORE_CUDA_LOOKUP_MEET_CUH_
#define SOK_CORE_CUDA_LOOKUP_MEET_CUH_

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/hash.h"

namespace sok {
namespace cuda {

inline constexpr uint32_t kEmptySlot = 0xFFFFFFFFu;

// How positions are coded in the slots: the least code wins.
struct PositionCode {
  uint32_t last;  // num_keys - 1 if the last occurrence is wanted, else 0

  SOK_HD uint32_t Code(uint32_t position) const { return last == 0 ? position : last - position; }
};

// Where the keys of a batch meet.
struct Meeting {
  uint32_t* slots;    // [mask + 1] codes
  uint32_t* slot_of;  // [num_keys]
  uint64_t mask;
  ProbeHome home;
  PositionCode positions;
};

struct MeetJob {
  const uint64_t* keys;
  int64_t num_keys;
  Meeting places;

  int64_t NumThreads() const { return num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= num_keys) return;
    const uint64_t key = keys[i];
    const uint32_t code = places.positions.Code(static_cast<uint32_t>(i));
    for (uint64_t slot = places.home(HashKey(key));; slot = (slot + 1) & places.mask) {
      uint32_t there = __ldcg(&places.slots[slot]);
      if (there == kEmptySlot) {
        there = atomicCAS(&places.slots[slot], kEmptySlot, code);
        if (there == kEmptySlot) there = code;
      }
      // Whatever code the slot holds by now, it is a position of the same key.
      if (there != code && keys[places.positions.Code(there)] != key) continue;
      if (there > code) atomicMin(&places.slots[slot], code);
      places.slot_of[i] = static_cast<uint32_t>(slot);
      return;
    }
  }
};

// Position that stands for the key at position i, once all keys have met.
SOK_DEVICE uint32_t ChosenPosition(const Meeting& places, int64_t i) {
  return places.positions.Code(places.slots[places.slot_of[i]]);
}

// Where each batch begins in an array that holds size_of(num_keys) elements per batch.
template <typename Batch, typename F>
std::vector<int64_t> Starts(const std::vector<Batch>& batches, const F& size_of) {
  std::vector<int64_t> starts = {0};
  for (const Batch& batch : batches) starts.push_back(starts.back() + size_of(batch.num_keys));
  return starts;
}

inline int64_t NumKeys(int64_t num_keys) { return num_keys; }

// Before any memory is taken for the batches.
template <typename Batch>
void CheckNumKeys(const std::vector<Batch>& batches) {
  for (const Batch& batch : batches) {
    if (batch.num_keys >= 0 && batch.num_keys < int64_t{1} << 30) continue;
    throw std::invalid_argument("A batch must have between 0 and 2^30 - 1 keys. Received: " +
                                std::to_string(batch.num_keys));
  }
}

// Gives equal keys of each batch one slot. `slots`: NumSlots of the batches, as for Unique.
template <typename Batch>
std::vector<Meeting> Meet(Stream stream, Workspace& workspace, const std::vector<Batch>& batches,
                          Occurrence occurrence, uint32_t* slots) {
  CheckNumKeys(batches);
  const std::vector<int64_t> first_slot = Starts(batches, NumSlots);
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  uint32_t* const slot_of = workspace.Take<uint32_t>(first_key.back());
  if (slots == nullptr) {
    slots = workspace.Take<uint32_t>(first_slot.back());
    FillWithOnes(stream, slots, first_slot.back() * sizeof(uint32_t));
  }
  std::vector<Meeting> places;
  std::vector<MeetJob> jobs;
  for (size_t b = 0; b < batches.size(); ++b) {
    const int64_t num_keys = batches[b].num_keys;
    Meeting place;
    place.slots = slots + first_slot[b];
    place.slot_of = slot_of + first_key[b];
    place.mask = static_cast<uint64_t>(first_slot[b + 1] - first_slot[b]) - 1;
    place.home = ProbeHome::Of(place.mask + 1);
    const bool last = occurrence == Occurrence::kLast && num_keys > 0;
    place.positions.last = last ? static_cast<uint32_t>(num_keys - 1) : 0;
    places.push_back(place);
    jobs.push_back({batches[b].keys, num_keys, place});
  }
  LaunchJobs(stream, jobs);
  return places;
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_LOOKUP_MEET_CUH_
