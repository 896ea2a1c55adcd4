#include <stdexcept>
#include <string>

#include "cpp/core/cuda/launch.cuh"
#include "cpp/core/cuda/primitives.h"
#include "cpp/core/cuda/unique.h"
#include "cpp/core/hash.h"

namespace sok {
namespace cuda {
namespace {

constexpr uint32_t kEmptySlot = 0xFFFFFFFFu;

// Positions as they are kept in the slots: the one to stay is the least.
struct Positions {
  uint32_t last;  // num_keys - 1 where the last occurrence is wanted, else 0

  SOK_HD uint32_t Code(uint32_t position) const { return last == 0 ? position : last - position; }
};

struct Places {
  uint32_t* slots;    // [mask + 1] codes
  uint32_t* slot_of;  // [num_keys]
  uint64_t mask;
  Positions positions;
};

__global__ void __launch_bounds__(kThreads)
    MeetKernel(const uint64_t* keys, int64_t num_keys, Places places) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const uint64_t key = keys[i];
  const uint32_t code = places.positions.Code(static_cast<uint32_t>(i));
  for (uint64_t slot = HashBucket(HashKey(key)) & places.mask;; slot = (slot + 1) & places.mask) {
    uint32_t there = __ldcg(&places.slots[slot]);
    if (there == kEmptySlot) {
      there = atomicCAS(&places.slots[slot], kEmptySlot, code);
      if (there == kEmptySlot) there = code;
    }
    // Whatever code the slot holds by now, it is a position of this same key.
    if (there != code && keys[places.positions.Code(there)] != key) continue;
    if (there > code) atomicMin(&places.slots[slot], code);
    places.slot_of[i] = static_cast<uint32_t>(slot);
    return;
  }
}

SOK_DEVICE uint32_t ChosenPosition(const Places& places, int64_t i) {
  return places.positions.Code(places.slots[places.slot_of[i]]);
}

template <typename Flag>
__global__ void __launch_bounds__(kThreads)
    FlagKernel(Places places, int64_t num_keys, Flag* flags) {
  const int64_t i = GlobalThread();
  if (i < num_keys) flags[i] = ChosenPosition(places, i) == static_cast<uint32_t>(i) ? 1 : 0;
}

__global__ void __launch_bounds__(kThreads)
    WriteUniqueKernel(const uint64_t* keys, int64_t num_keys, Places places, const uint32_t* ranks,
                      uint64_t* unique, int32_t* inverse, uint32_t* num_unique) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const uint32_t first = ChosenPosition(places, i);
  const bool is_first = first == static_cast<uint32_t>(i);
  inverse[i] = static_cast<int32_t>(ranks[first]);
  if (is_first) unique[ranks[i]] = keys[i];
  if (i == num_keys - 1) *num_unique = ranks[i] + (is_first ? 1 : 0);
}

// Owner of each unique key; what lies behind them goes to the end.
__global__ void __launch_bounds__(kThreads)
    OwnersKernel(const uint64_t* unique, Count num_unique, uint64_t world_size, uint32_t* owners,
                 uint32_t* order) {
  const int64_t i = GlobalThread();
  if (i >= num_unique.most) return;
  owners[i] = static_cast<uint32_t>(i < num_unique.Get() ? unique[i] % world_size : world_size);
  order[i] = static_cast<uint32_t>(i);
}

// owners ascend; offsets[o] = first place with an owner of at least o.
__global__ void __launch_bounds__(kThreads)
    OffsetsKernel(const uint32_t* owners, int64_t num_places, int64_t world_size,
                  int64_t* offsets) {
  const int64_t i = GlobalThread();
  if (i > num_places) return;
  const int64_t before = i == 0 ? -1 : int64_t{owners[i - 1]};
  const int64_t here = i == num_places ? world_size : int64_t{owners[i]};
  for (int64_t owner = before + 1; owner <= here; ++owner) offsets[owner] = i;
}

__global__ void __launch_bounds__(kThreads)
    PermuteUniqueKernel(const uint64_t* from, const uint32_t* order, Count num_unique, uint64_t* to,
                        uint32_t* place_of) {
  const int64_t i = GlobalThread();
  if (i >= num_unique.Get()) return;
  to[i] = from[order[i]];
  place_of[order[i]] = static_cast<uint32_t>(i);
}

__global__ void __launch_bounds__(kThreads)
    PermuteInverseKernel(const uint32_t* place_of, int64_t num_keys, int32_t* inverse) {
  const int64_t i = GlobalThread();
  if (i < num_keys) inverse[i] = static_cast<int32_t>(place_of[inverse[i]]);
}

__global__ void OneOwnerKernel(const uint32_t* num_unique, int64_t* offsets) {
  if (threadIdx.x == 0) {
    offsets[0] = 0;
    offsets[1] = *num_unique;
  }
}

// Lets equal keys meet.
Places Meet(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
            Occurrence occurrence) {
  if (num_keys < 0 || num_keys >= int64_t{1} << 30) {
    throw std::invalid_argument("A batch must have between 0 and 2^30 - 1 keys. Received: " +
                                std::to_string(num_keys));
  }
  Places places;
  int64_t num_slots = 64;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  places.mask = static_cast<uint64_t>(num_slots) - 1;
  places.slots = workspace.Take<uint32_t>(num_slots);
  places.slot_of = workspace.Take<uint32_t>(num_keys);
  const bool last = occurrence == Occurrence::kLast && num_keys > 0;
  places.positions.last = last ? static_cast<uint32_t>(num_keys - 1) : 0;
  Check(cudaMemsetAsync(places.slots, 0xFF, num_slots * sizeof(uint32_t), stream),
        "cudaMemsetAsync");
  Launch(MeetKernel, num_keys, stream, keys, num_keys, places);
  return places;
}

}  // namespace

void Unique(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
            uint64_t* unique, int32_t* inverse, uint32_t* num_unique) {
  const Workspace::Scope scope(workspace, stream);
  const Places places = Meet(stream, workspace, keys, num_keys, Occurrence::kFirst);
  uint32_t* const ranks = workspace.Take<uint32_t>(num_keys);
  if (num_keys == 0) {  // else the last key writes it
    Check(cudaMemsetAsync(num_unique, 0, sizeof(uint32_t), stream), "cudaMemsetAsync");
  }
  Launch(FlagKernel<uint32_t>, num_keys, stream, places, num_keys, ranks);
  ExclusiveSum(stream, workspace, ranks, num_keys);
  Launch(WriteUniqueKernel, num_keys, stream, keys, num_keys, places, ranks, unique, inverse,
         num_unique);
}

void UniqueByOwner(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
                   int64_t world_size, uint64_t* unique, int32_t* inverse, int64_t* owner_offsets) {
  if (world_size < 1 || world_size >= int64_t{1} << 31) {
    throw std::invalid_argument("`world_size` must be between 1 and 2^31 - 1. Received: " +
                                std::to_string(world_size));
  }
  const Workspace::Scope scope(workspace, stream);
  uint32_t* const num_unique = workspace.Take<uint32_t>(1);
  if (world_size == 1) {  // in order as they are
    Unique(stream, workspace, keys, num_keys, unique, inverse, num_unique);
    Launch(OneOwnerKernel, 1, stream, num_unique, owner_offsets);
    return;
  }
  uint64_t* const in_order = workspace.Take<uint64_t>(num_keys);
  Unique(stream, workspace, keys, num_keys, in_order, inverse, num_unique);
  const Count count(num_keys, num_unique);
  uint32_t* const owners = workspace.Take<uint32_t>(num_keys);
  uint32_t* const order = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_owners = workspace.Take<uint32_t>(num_keys);
  uint32_t* const sorted_order = workspace.Take<uint32_t>(num_keys);
  uint32_t* const place_of = workspace.Take<uint32_t>(num_keys);
  Launch(OwnersKernel, num_keys, stream, in_order, count, static_cast<uint64_t>(world_size), owners,
         order);
  SortPairs(stream, workspace, owners, sorted_owners, order, sorted_order, num_keys,
            BitsBelow(world_size + 1));
  Launch(OffsetsKernel, num_keys + 1, stream, sorted_owners, num_keys, world_size, owner_offsets);
  Launch(PermuteUniqueKernel, num_keys, stream, in_order, sorted_order, count, unique, place_of);
  Launch(PermuteInverseKernel, num_keys, stream, place_of, num_keys, inverse);
}

void ChooseOccurrence(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
                      Occurrence occurrence, uint8_t* chosen) {
  const Workspace::Scope scope(workspace, stream);
  const Places places = Meet(stream, workspace, keys, num_keys, occurrence);
  Launch(FlagKernel<uint8_t>, num_keys, stream, places, num_keys, chosen);
}

}  // namespace cuda
}  // namespace sok
