// Keys of several ranks merged under the emulator: against a map in order of first occurrence.
#include "cpp/core/cuda/lookup/merge_keys.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "cpp/tests/check.h"
#include "cpp/tests/cuda/device_array.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

const cuda::Stream kStream = emulator::StreamOfNumber(1);  // runs late

// Some ranks send nothing, some tables get nothing.
std::vector<std::vector<uint64_t>> KeysOfRanks(std::mt19937_64& random, int64_t world_size) {
  std::vector<std::vector<uint64_t>> of_rank(world_size);
  if (random() % 5 == 0) return of_rank;
  std::vector<uint64_t> all(1 + random() % 200);
  std::iota(all.begin(), all.end(), random() % 1000);
  for (auto& keys : of_rank) {
    std::shuffle(all.begin(), all.end(), random);
    if (random() % 3 != 0) keys.assign(all.begin(), all.begin() + random() % (all.size() + 1));
  }
  return of_rank;
}

void MergedInOrderOfOccurrence(int64_t world_size, size_t num_batches) {
  std::mt19937_64 random(world_size * 100 + num_batches);
  cuda::Workspace workspace;
  for (int call = 0; call < 2; ++call) {  // the second in scratch that holds the first's
    const cuda::Workspace::Scope scope(workspace, kStream);
    std::vector<std::vector<uint64_t>> keys(num_batches);
    std::vector<DeviceArray<uint64_t>> on_device, unique;
    std::vector<DeviceArray<uint32_t>> begins;
    std::vector<cuda::MergeBatch> batches;
    for (size_t b = 0; b < num_batches; ++b) {
      std::vector<uint32_t> of_ranks;
      for (const auto& of_rank : KeysOfRanks(random, world_size)) {
        of_ranks.push_back(static_cast<uint32_t>(keys[b].size()));
        keys[b].insert(keys[b].end(), of_rank.begin(), of_rank.end());
      }
      on_device.emplace_back(keys[b], kStream);
      begins.emplace_back(of_ranks, kStream);
      unique.emplace_back(keys[b].size(), 0, kStream);
      batches.push_back({on_device[b], static_cast<int64_t>(keys[b].size()), begins[b], unique[b]});
    }
    const cuda::MergedKeys merged = cuda::MergeKeys(kStream, workspace, batches, world_size);
    int64_t first_key = 0;
    uint32_t first_row = 0;
    for (size_t b = 0; b < num_batches; ++b) {
      std::vector<uint64_t> expected;
      std::map<uint64_t, std::vector<uint32_t>> positions_of;
      for (size_t i = 0; i < keys[b].size(); ++i) {
        if (positions_of[keys[b][i]].empty()) expected.push_back(keys[b][i]);
        positions_of[keys[b][i]].push_back(static_cast<uint32_t>(i));
      }
      CHECK_EQ(merged.num_unique[b], static_cast<int64_t>(expected.size()));
      std::vector<uint64_t> found = unique[b].Get();
      found.resize(expected.size());
      CHECK(found == expected);
      std::vector<uint32_t> rows, positions;
      for (size_t u = 0; u < expected.size(); ++u) {
        for (const uint32_t i : positions_of[expected[u]]) {
          rows.push_back(first_row + static_cast<uint32_t>(u));
          positions.push_back(i);
        }
      }
      std::vector<uint32_t> found_rows(rows.size()), found_positions(rows.size());
      const size_t bytes = rows.size() * sizeof(uint32_t);
      cuda::CopyToHost(kStream, found_rows.data(), merged.rows + first_key, bytes);
      cuda::CopyToHost(kStream, found_positions.data(), merged.positions + first_key, bytes);
      CHECK(found_rows == rows);
      CHECK(found_positions == positions);
      first_key += batches[b].num_keys;
      first_row += static_cast<uint32_t>(expected.size());
    }
  }
}

void AKeyThatARankSendsTwiceIsRefused() {
  cuda::Workspace workspace;
  const cuda::Workspace::Scope scope(workspace, kStream);
  const DeviceArray<uint64_t> keys({7, 8, 8, 8, 9}, kStream), unique(5, 0, kStream);
  const DeviceArray<uint32_t> begins({0, 2}, kStream);
  CHECK_THROWS(cuda::MergeKeys(kStream, workspace, {{keys, 5, begins, unique}}, 2),
               std::invalid_argument, "Each rank must send a key once. Received: 1 keys twice");
}

}  // namespace
}  // namespace sok

int main() {
  for (const int64_t world_size : {1, 2, 3, 64, 65, 200}) {
    for (const size_t num_batches : {1, 2, 30}) {
      if (world_size > 3 && num_batches == 30) continue;
      sok::MergedInOrderOfOccurrence(world_size, num_batches);
    }
  }
  sok::AKeyThatARankSendsTwiceIsRefused();
}
