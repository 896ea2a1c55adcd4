#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/hash.h"

namespace sok {
namespace cuda {
namespace {

constexpr uint32_t kEmptySlot = 0xFFFFFFFFu;

// How positions are coded in the slots: the least code wins.
struct Positions {
  uint32_t last;  // num_keys - 1 if the last occurrence is wanted, else 0

  SOK_HD uint32_t Code(uint32_t position) const { return last == 0 ? position : last - position; }
};

struct Places {
  uint32_t* slots;    // [mask + 1] codes
  uint32_t* slot_of;  // [num_keys]
  uint64_t mask;
  ProbeHome home;
  Positions positions;
};

struct MeetJob {
  const uint64_t* keys;
  int64_t num_keys;
  Places places;

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

SOK_DEVICE uint32_t ChosenPosition(const Places& places, int64_t i) {
  return places.positions.Code(places.slots[places.slot_of[i]]);
}

template <typename Flag>
struct FlagJob {
  Places places;
  int64_t num_keys;
  Flag* flags;  // [num_keys]

  int64_t NumThreads() const { return num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i < num_keys) flags[i] = ChosenPosition(places, i) == static_cast<uint32_t>(i) ? 1 : 0;
  }
};

// Ranks count over all batches: those of a batch begin at the rank of its first key.
struct WriteUniqueJob {
  UniqueBatch batch;
  Places places;
  const uint32_t* ranks;  // [num_keys]

  int64_t NumThreads() const { return std::max<int64_t>(1, batch.num_keys); }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= batch.num_keys) {
      if (i == 0) *batch.num_unique = 0;
      return;
    }
    const uint32_t first = ChosenPosition(places, i);
    const uint32_t rank = ranks[first] - ranks[0];
    const bool is_first = first == static_cast<uint32_t>(i);
    batch.inverse[i] = static_cast<int32_t>(rank);
    if (is_first) batch.unique[rank] = batch.keys[i];
    if (i == batch.num_keys - 1) {
      *batch.num_unique = ranks[i] - ranks[0] + (is_first ? 1 : 0);
    }
  }
};

// ---- by owner ----

// A batch whose unique keys are sorted by owner. Owners count over all batches, so that one sort
// handles all.
struct Routed {
  UniqueByOwnerBatch batch;
  Places places;
  int64_t world_size;
  uint32_t first_owner;     // the number of this batch's rank 0
  uint32_t* owners;         // [num_keys]
  uint32_t* positions;      // [num_keys]
  uint32_t* sorted_owners;  // the same, sorted
  uint32_t* sorted_positions;
  uint32_t* place_of;  // [num_keys] of a key's first position: its place among the unique keys
};

// The owner of each key at its first position. The other positions get the highest owner, so that
// they go to the batch's end.
struct OwnersJob : Routed {
  int64_t NumThreads() const { return batch.num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= batch.num_keys) return;
    const uint64_t world = static_cast<uint64_t>(world_size);
    const bool is_first = ChosenPosition(places, i) == static_cast<uint32_t>(i);
    owners[i] = first_owner + static_cast<uint32_t>(is_first ? batch.keys[i] % world : world);
    positions[i] = static_cast<uint32_t>(i);
  }
};

// Owners ascend; owner_offsets[o] = first place with an owner of at least o.
struct WriteByOwnerJob : Routed {
  int64_t NumThreads() const { return batch.num_keys + 1; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i > batch.num_keys) return;
    const int64_t before = i == 0 ? -1 : int64_t{sorted_owners[i - 1]} - first_owner;
    const int64_t here = i == batch.num_keys ? world_size : int64_t{sorted_owners[i]} - first_owner;
    for (int64_t owner = before + 1; owner <= here; ++owner) batch.owner_offsets[owner] = i;
    if (here == world_size) return;
    batch.unique[i] = batch.keys[sorted_positions[i]];
    place_of[sorted_positions[i]] = static_cast<uint32_t>(i);
  }
};

struct InverseByOwnerJob : Routed {
  int64_t NumThreads() const { return batch.num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= batch.num_keys) return;
    batch.inverse[i] = static_cast<int32_t>(place_of[ChosenPosition(places, i)]);
  }
};

template <typename Job>
std::vector<Job> JobsOf(const std::vector<Routed>& batches) {
  std::vector<Job> jobs;
  for (const Routed& batch : batches) jobs.push_back({batch});
  return jobs;
}

struct OneOwnerJob {
  const uint32_t* num_unique;
  int64_t* offsets;

  int64_t NumThreads() const { return 1; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i != 0) return;
    offsets[0] = 0;
    offsets[1] = *num_unique;
  }
};

struct PlaceJob {
  PlaceBatch batch;
  int64_t world_size;

  int64_t NumThreads() const { return batch.num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i < batch.num_keys) batch.keys[i] = PlaceRow(batch.placement, world_size, batch.ids[i]);
  }
};

// ---- all batches ----

// Where each batch begins in an array that holds size_of(num_keys) elements per batch.
template <typename Batch, typename F>
std::vector<int64_t> Starts(const std::vector<Batch>& batches, const F& size_of) {
  std::vector<int64_t> starts = {0};
  for (const Batch& batch : batches) starts.push_back(starts.back() + size_of(batch.num_keys));
  return starts;
}

int64_t NumKeys(int64_t num_keys) { return num_keys; }

int64_t NumSlots(int64_t num_keys) {
  int64_t num_slots = 64;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

// Gives equal keys of each batch one slot.
template <typename Batch>
std::vector<Places> Meet(Stream stream, Workspace& workspace, const std::vector<Batch>& batches,
                         Occurrence occurrence) {
  for (const Batch& batch : batches) {
    if (batch.num_keys >= 0 && batch.num_keys < int64_t{1} << 30) continue;
    throw std::invalid_argument("A batch must have between 0 and 2^30 - 1 keys. Received: " +
                                std::to_string(batch.num_keys));
  }
  const std::vector<int64_t> first_slot = Starts(batches, NumSlots);
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  uint32_t* const slots = workspace.Take<uint32_t>(first_slot.back());
  uint32_t* const slot_of = workspace.Take<uint32_t>(first_key.back());
  CudaCheck(cudaMemsetAsync(slots, 0xFF, first_slot.back() * sizeof(uint32_t), stream),
            "cudaMemsetAsync");
  std::vector<Places> places;
  std::vector<MeetJob> jobs;
  for (size_t b = 0; b < batches.size(); ++b) {
    const int64_t num_keys = batches[b].num_keys;
    Places place;
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

}  // namespace

void Unique(Stream stream, Workspace& workspace, const std::vector<UniqueBatch>& batches) {
  if (batches.empty()) return;
  const Workspace::Scope scope(workspace, stream);
  const std::vector<Places> places = Meet(stream, workspace, batches, Occurrence::kFirst);
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  uint32_t* const ranks = workspace.Take<uint32_t>(first_key.back());
  std::vector<FlagJob<uint32_t>> flags;
  std::vector<WriteUniqueJob> writes;
  for (size_t b = 0; b < batches.size(); ++b) {
    flags.push_back({places[b], batches[b].num_keys, ranks + first_key[b]});
    writes.push_back({batches[b], places[b], ranks + first_key[b]});
  }
  LaunchJobs(stream, flags);
  ExclusiveSum(stream, workspace, ranks, first_key.back());
  LaunchJobs(stream, writes);
}

void UniqueByOwner(Stream stream, Workspace& workspace,
                   const std::vector<UniqueByOwnerBatch>& batches, int64_t world_size) {
  if (world_size < 1 || world_size > int64_t{1} << 24) {
    throw std::invalid_argument("`world_size` must be between 1 and 2^24. Received: " +
                                std::to_string(world_size));
  }
  const int64_t num_batches = batches.size();
  const int64_t num_owners = num_batches * (world_size + 1);
  if (num_owners > UINT32_MAX) {
    throw std::invalid_argument(
        "The number of tables times (world_size + 1) must be below 2^32. Received: " +
        std::to_string(num_batches) + " tables, world_size=" + std::to_string(world_size));
  }
  const Workspace::Scope scope(workspace, stream);
  if (world_size == 1) {  // order of occurrence is order by owner
    uint32_t* const num_unique = workspace.Take<uint32_t>(num_batches);
    std::vector<UniqueBatch> uniques;
    std::vector<OneOwnerJob> jobs;
    for (int64_t b = 0; b < num_batches; ++b) {
      const UniqueByOwnerBatch& batch = batches[b];
      uniques.push_back({batch.keys, batch.num_keys, batch.unique, batch.inverse, num_unique + b});
      jobs.push_back({num_unique + b, batch.owner_offsets});
    }
    Unique(stream, workspace, uniques);
    return LaunchJobs(stream, jobs);
  }
  if (batches.empty()) return;
  const std::vector<Places> places = Meet(stream, workspace, batches, Occurrence::kFirst);
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  const int64_t total = first_key.back();
  uint32_t* scratch[5];
  for (uint32_t*& array : scratch) array = workspace.Take<uint32_t>(total);
  const auto [owners, positions, sorted_owners, sorted_positions, place_of] = scratch;
  std::vector<Routed> routed;
  for (int64_t b = 0; b < num_batches; ++b) {
    const int64_t at = first_key[b];
    routed.push_back({batches[b], places[b], world_size,
                      static_cast<uint32_t>(b * (world_size + 1)), owners + at, positions + at,
                      sorted_owners + at, sorted_positions + at, place_of + at});
  }
  LaunchJobs(stream, JobsOf<OwnersJob>(routed));
  SortPairs(stream, workspace, owners, sorted_owners, positions, sorted_positions, total,
            BitsBelow(num_owners));
  LaunchJobs(stream, JobsOf<WriteByOwnerJob>(routed));
  LaunchJobs(stream, JobsOf<InverseByOwnerJob>(routed));
}

void ChooseOccurrence(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
                      Occurrence occurrence, uint8_t* chosen) {
  const Workspace::Scope scope(workspace, stream);
  struct Batch {
    const uint64_t* keys;
    int64_t num_keys;
  };
  const std::vector<Batch> one = {{keys, num_keys}};
  const Places places = Meet(stream, workspace, one, occurrence)[0];
  LaunchJobs<FlagJob<uint8_t>>(stream, {{places, num_keys, chosen}});
}

void PlaceRows(Stream stream, int64_t world_size, const std::vector<PlaceBatch>& batches) {
  std::vector<PlaceJob> jobs;
  for (const PlaceBatch& batch : batches) jobs.push_back({batch, world_size});
  LaunchJobs(stream, jobs);
}

}  // namespace cuda
}  // namespace sok
