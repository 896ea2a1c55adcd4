#include <algorithm>
#include <stdexcept>

#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/lookup/meet.cuh"
#include "cpp/core/cuda/lookup/merge_keys.h"

namespace sok {
namespace cuda {
namespace {

struct Merge {
  const uint64_t* keys;
  int64_t num_keys;
  Meeting meeting;
  const uint32_t* begins;  // [world_size]
  int64_t world_size;
  uint64_t* masks;  // [num_keys, num_words] of the ranks that did not send a key
  int64_t num_words;

  // The last rank whose keys begin at or before position i.
  SOK_DEVICE int64_t RankOf(int64_t i) const {
    int64_t low = 0, high = world_size;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (begins[middle] <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

struct MarkJob : Merge {
  int64_t NumThreads() const { return num_keys; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= num_keys) return;
    const int64_t rank = RankOf(i), first = ChosenPosition(meeting, i);
    atomicAnd(reinterpret_cast<unsigned long long*>(masks + first * num_words + rank / 64),
              ~(1ull << rank % 64));
  }
};

// What the host learns of a batch.
struct Merged {
  uint32_t num_unique;
  uint32_t num_places;
};

struct WriteMergedJob : Merge {
  const uint64_t* sums;  // [num_keys] of SumMasks over all batches
  uint32_t* rows;        // [keys of all batches]
  uint32_t* positions;   // the same
  uint64_t* unique;
  Merged* merged;  // in pinned memory

  int64_t NumThreads() const { return std::max<int64_t>(1, num_keys); }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= num_keys) {
      if (i == 0) *merged = {0, 0};
      return;
    }
    const int64_t first = ChosenPosition(meeting, i), rank = RankOf(i);
    const uint64_t* const mask = masks + first * num_words;
    uint32_t place = static_cast<uint32_t>(sums[first]);
    for (int64_t word = 0; word < rank / 64; ++word) place += BitsSet(~mask[word]);
    place += BitsSet(~mask[rank / 64] & ((uint64_t{1} << rank % 64) - 1));
    const uint32_t row = static_cast<uint32_t>(sums[first] >> 32);
    rows[place] = row;
    positions[place] = static_cast<uint32_t>(i);
    if (first == i) unique[row - static_cast<uint32_t>(sums[0] >> 32)] = keys[i];
    if (i == num_keys - 1) {
      const uint64_t end = sums[i] + CountOfMask(masks + i * num_words, num_words) - sums[0];
      *merged = {static_cast<uint32_t>(end >> 32), static_cast<uint32_t>(end)};
    }
  }
};

}  // namespace

MergedKeys MergeKeys(Stream stream, Workspace& workspace, const std::vector<MergeBatch>& batches,
                     int64_t world_size) {
  CheckNumKeys(batches);
  const size_t n = batches.size();
  const std::vector<int64_t> first_key = Starts(batches, NumKeys);
  const int64_t total = first_key.back(), num_slots = Starts(batches, NumSlots).back();
  const int64_t num_words = (world_size + 63) / 64;
  // Masks and slots in one piece, for one fill.
  uint64_t* const masks = workspace.Take<uint64_t>(total * num_words + num_slots / 2);
  auto* const slots = reinterpret_cast<uint32_t*>(masks + total * num_words);
  FillWithOnes(stream, masks, total * num_words * sizeof(uint64_t) + num_slots * sizeof(uint32_t));
  uint64_t* const sums = workspace.Take<uint64_t>(total);
  uint32_t* const rows = workspace.Take<uint32_t>(total);
  uint32_t* const positions = workspace.Take<uint32_t>(total);
  const std::vector<Meeting> meetings = Meet(stream, workspace, batches, Occurrence::kFirst, slots);
  const PinnedPiece piece(n * sizeof(Merged));
  std::vector<MarkJob> marks;
  std::vector<WriteMergedJob> writes;
  for (size_t b = 0; b < n; ++b) {
    const Merge merge = {batches[b].keys,   batches[b].num_keys, meetings[b],
                         batches[b].begins, world_size,          masks + first_key[b] * num_words,
                         num_words};
    marks.push_back({merge});
    writes.push_back(
        {merge, sums + first_key[b], rows, positions, batches[b].unique, piece.as<Merged>() + b});
  }
  LaunchJobs(stream, marks);
  SumMasks(stream, workspace, masks, num_words, total, sums);
  LaunchJobs(stream, writes);
  Synchronize(stream);
  MergedKeys result = {{}, rows, positions};
  for (size_t b = 0; b < n; ++b) {
    const Merged merged = piece.as<Merged>()[b];
    if (merged.num_places != batches[b].num_keys) {
      throw std::invalid_argument("Each rank must send a key once. Received: " +
                                  std::to_string(batches[b].num_keys - merged.num_places) +
                                  " keys twice (batch " + std::to_string(b) + ")");
    }
    result.num_unique.push_back(merged.num_unique);
  }
  return result;
}

}  // namespace cuda
}  // namespace sok
