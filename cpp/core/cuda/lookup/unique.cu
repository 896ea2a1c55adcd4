#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/lookup/meet.cuh"
#include "cpp/core/cuda/lookup/unique.h"

namespace sok {
namespace cuda {
namespace {

template <typename Flag>
struct FlagJob {
  Meeting places;
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
  Meeting places;
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

// Positions are counted by owner in tiles, the positions of a block. A key's place among the unique
// keys is what comes before its tile, plus its rank within the tile.
constexpr int64_t kTile = kThreads;

int64_t NumTiles(int64_t num_keys) { return std::max<int64_t>(1, (num_keys + kTile - 1) / kTile); }

struct Routed {
  UniqueByOwnerBatch batch;
  Meeting meeting;
  int64_t world_size;
  int64_t num_tiles;
  uint8_t* ranks;    // [num_keys] of a first position: those of its owner before it in its tile
  uint32_t* counts;  // [world_size, num_tiles] first positions minus 1: all bits are set for none
  const uint32_t* starts;  // the same: sum of what comes before, over all batches

  SOK_DEVICE int64_t OwnerOf(int64_t i) const {
    return static_cast<int64_t>(batch.keys[i] % static_cast<uint64_t>(world_size));
  }
};

// A thread compares its owner with all others of the tile: two instructions for each that comes
// before, one for each behind. By estimate, 1.7 million keys take 30 us, as the passes of a sort do,
// and a small batch saves a sort's launches.
struct CountByOwnerJob : Routed {
  int64_t NumThreads() const { return batch.num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    SOK_SHARED(uint4, of_tile, kThreads / 4);  // the owners: four are read at a time
    uint32_t* const owners = reinterpret_cast<uint32_t*>(of_tile);
    const bool is_first =
        i < batch.num_keys && ChosenPosition(meeting, i) == static_cast<uint32_t>(i);
    const uint32_t owner = is_first ? static_cast<uint32_t>(OwnerOf(i)) : kEmptySlot;
    owners[threadIdx.x] = owner;
    __syncthreads();
    if (!is_first) return;
    const uint32_t warp = threadIdx.x / kWarp * kWarp;
    uint32_t before = 0;
    bool is_behind = false;  // another one
#pragma unroll 4
    for (uint32_t j = 0; j < warp / 4; ++j) {
      const uint4 four = of_tile[j];
      before += four.x == owner ? 1 : 0;
      before += four.y == owner ? 1 : 0;
      before += four.z == owner ? 1 : 0;
      before += four.w == owner ? 1 : 0;
    }
    for (uint32_t j = warp; j < warp + kWarp; ++j) {
      if (owners[j] != owner) continue;
      before += j < threadIdx.x ? 1 : 0;
      is_behind |= j > threadIdx.x;
    }
#pragma unroll 4
    for (uint32_t j = warp / 4 + kWarp / 4; j < kThreads / 4; ++j) {
      const uint4 four = of_tile[j];
      is_behind |= four.x == owner || four.y == owner || four.z == owner || four.w == owner;
    }
    ranks[i] = static_cast<uint8_t>(before);
    if (!is_behind) counts[owner * num_tiles + i / kTile] = before;
  }
};

struct WriteByOwnerJob : Routed {
  int64_t NumThreads() const { return std::max(batch.num_keys, world_size + 1); }
  SOK_DEVICE void Run(int64_t i) const {
    if (i <= world_size) {
      const int64_t last = world_size * num_tiles - 1;
      const uint32_t end = i < world_size ? starts[i * num_tiles] : starts[last] + counts[last] + 1;
      batch.owner_offsets[i] = end - starts[0];
    }
    if (i >= batch.num_keys) return;
    const uint32_t first = ChosenPosition(meeting, i);
    const uint32_t place =
        starts[OwnerOf(i) * num_tiles + first / kTile] - starts[0] + ranks[first];
    batch.inverse[i] = static_cast<int32_t>(place);
    if (first == static_cast<uint32_t>(i)) batch.unique[place] = batch.keys[i];
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

}  // namespace

int64_t NumSlots(int64_t num_keys) {
  int64_t num_slots = 64;
  while (num_slots < 2 * num_keys) num_slots *= 2;
  return num_slots;
}

void Unique(Stream stream, Workspace& workspace, const std::vector<UniqueBatch>& batches,
            uint32_t* slots) {
  if (batches.empty()) return;
  const Workspace::Scope scope(workspace, stream);
  const std::vector<Meeting> places = Meet(stream, workspace, batches, Occurrence::kFirst, slots);
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

int64_t NumOnesByOwner(int64_t num_keys, int64_t world_size) {
  return NumSlots(num_keys) + world_size * NumTiles(num_keys);
}

void UniqueByOwner(Stream stream, Workspace& workspace,
                   const std::vector<UniqueByOwnerBatch>& batches, int64_t world_size,
                   uint32_t* ones) {
  if (world_size < 1 || world_size > int64_t{1} << 24) {
    throw std::invalid_argument("`world_size` must be between 1 and 2^24. Received: " +
                                std::to_string(world_size));
  }
  if (batches.empty()) return;
  CheckNumKeys(batches);
  const Workspace::Scope scope(workspace, stream);
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  const std::vector<int64_t> first_count =
      Starts(batches, [&](int64_t num_keys) { return world_size * NumTiles(num_keys); });
  const int64_t num_counts = first_count.back(), num_slots = Starts(batches, NumSlots).back();
  if (num_counts > INT32_MAX) {
    throw std::invalid_argument(
        "world_size times the tiles of 256 keys must be below 2^31. Received: " +
        std::to_string(num_counts / world_size) +
        " tiles, world_size=" + std::to_string(world_size));
  }
  if (ones == nullptr) {
    ones = workspace.Take<uint32_t>(num_slots + num_counts);
    FillWithOnes(stream, ones, (num_slots + num_counts) * sizeof(uint32_t));
  }
  const std::vector<Meeting> meetings = Meet(stream, workspace, batches, Occurrence::kFirst, ones);
  uint32_t* const counts = ones + num_slots;
  uint32_t* const starts = workspace.Take<uint32_t>(num_counts);
  uint8_t* const ranks = workspace.Take<uint8_t>(first_key.back());
  std::vector<CountByOwnerJob> count;
  std::vector<WriteByOwnerJob> write;
  for (size_t b = 0; b < batches.size(); ++b) {
    const Routed routed = {batches[b],
                           meetings[b],
                           world_size,
                           NumTiles(batches[b].num_keys),
                           ranks + first_key[b],
                           counts + first_count[b],
                           starts + first_count[b]};
    count.push_back({routed});
    write.push_back({routed});
  }
  LaunchJobs(stream, count);
  SumCounts(stream, workspace, counts, starts, num_counts);
  LaunchJobs(stream, write);
}

void ChooseOccurrence(Stream stream, Workspace& workspace, const uint64_t* keys, int64_t num_keys,
                      Occurrence occurrence, uint8_t* chosen) {
  const Workspace::Scope scope(workspace, stream);
  struct Batch {
    const uint64_t* keys;
    int64_t num_keys;
  };
  const std::vector<Batch> one = {{keys, num_keys}};
  const Meeting places = Meet(stream, workspace, one, occurrence, nullptr)[0];
  LaunchJobs<FlagJob<uint8_t>>(stream, {{places, num_keys, chosen}});
}

void PlaceRows(Stream stream, int64_t world_size, const std::vector<PlaceBatch>& batches) {
  std::vector<PlaceJob> jobs;
  for (const PlaceBatch& batch : batches) jobs.push_back({batch, world_size});
  LaunchJobs(stream, jobs);
}

}  // namespace cuda
}  // namespace sok
