#include <stdexcept>

#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/lookup/combine_rows.cuh"
#include "cpp/core/cuda/lookup/sorted_positions.cuh"

namespace sok {
namespace cuda {
namespace {

// Threads below num_keys number the positions: positions count within their batch, rows over all
// batches, so that one sort handles all. Those behind them take a sample each and write the shares
// of its positions, if there are shares.
struct NumberJob {
  Samples samples;
  Shares shares;
  uint32_t first_row;
  uint32_t* rows;       // [num_keys]
  uint32_t* positions;  // [num_keys]

  SOK_HD int64_t NumThreads() const {
    return samples.num_keys + (shares.sample == nullptr ? 0 : samples.num_samples());
  }
  SOK_DEVICE void Run(int64_t i) const {
    if (i < samples.num_keys) {
      rows[i] = first_row + static_cast<uint32_t>(samples.inverse[i]);
      positions[i] = static_cast<uint32_t>(i);
    } else if (i < NumThreads()) {
      WriteShares(i - samples.num_keys);
    }
  }
  SOK_DEVICE void WriteShares(int64_t s) const {
    const bool none = samples.combiner == Combiner::kNone;
    const int64_t begin = samples.Begin(s), end = samples.End(s);
    const float divisor = none ? 1.0f : SampleDivisor(samples, begin, end);
    for (int64_t k = begin; k < end; ++k) {
      shares.sample[k] = static_cast<int32_t>(s);
      const float weight = samples.weights == nullptr ? 1.0f : samples.weights[k];
      shares.factor[k] = divisor == 0.0f ? 0.0f : weight / divisor;
    }
  }
};

}  // namespace

int64_t TileOf(int64_t num_keys, int64_t dim) {
  const int64_t pieces = (dim + 3) / 4;
  int64_t tile = 32;
  while (tile < 256 && num_keys / tile * pieces > int64_t{1} << 17) tile *= 2;
  return tile;
}

std::vector<SortedBatch> SortPositions(Stream stream, Workspace& workspace,
                                       const std::vector<PositionBatch>& sources) {
  int64_t num_keys = 0, num_rows = 0;
  for (const PositionBatch& source : sources) {
    num_keys += source.samples->num_keys;
    num_rows += source.num_unique;
  }
  if (num_rows > UINT32_MAX) {
    throw std::invalid_argument("A batch must have fewer than 2^32 rows. Received: " +
                                std::to_string(num_rows));
  }
  uint32_t* scratch[4];
  for (uint32_t*& array : scratch) array = workspace.Take<uint32_t>(num_keys);
  const auto [rows, positions, sorted_rows, sorted_positions] = scratch;
  std::vector<SortedBatch> sorted;
  std::vector<NumberJob> numbers;
  int64_t at = 0, first_row = 0;
  for (const PositionBatch& source : sources) {
    const Samples& samples = *source.samples;
    SortedBatch batch;
    if (samples.combiner != Combiner::kNone || samples.weights != nullptr) {
      batch.shares = {workspace.Take<int32_t>(samples.num_keys),
                      workspace.Take<float>(samples.num_keys)};
    }
    numbers.push_back(
        {samples, batch.shares, static_cast<uint32_t>(first_row), rows + at, positions + at});
    batch.positions = {sorted_rows + at,
                       sorted_positions + at,
                       samples.num_keys,
                       static_cast<uint32_t>(first_row),
                       TileOf(samples.num_keys, source.dim),
                       samples.combiner != Combiner::kSum};
    sorted.push_back(batch);
    at += samples.num_keys;
    first_row += source.num_unique;
  }
  LaunchJobs(stream, numbers);
  SortPairs(stream, workspace, rows, sorted_rows, positions, sorted_positions, num_keys,
            BitsBelow(num_rows));
  return sorted;
}

}  // namespace cuda
}  // namespace sok
