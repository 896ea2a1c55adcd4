#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "cpp/core/cuda/device/aggregated_increment.cuh"
#include "cpp/core/cuda/policies/filter.cuh"
#include "cpp/core/cuda/policies/record_kernels.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

__global__ void __launch_bounds__(kThreads)
    ClassifyKernel(TableRef table, const DeviceRecord* records, FilterRef filter,
                   const uint64_t* unique, Count num_unique, int64_t step, ClassifiedKeys out) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread();
  const bool is_key = i < num_unique.Get();
  uint32_t row = kNoRow;
  int64_t frequency = 0;
  bool counts = false;  // not yet counted in this step
  bool is_refused = false;
  if (is_key) {
    const uint64_t key = unique[i];
    const uint64_t hash = HashKey(key);
    row = FindRow(ReadOnlyMemory(), table.index, hash, key);
    out.rows[i] = row;
    if (row != kNoRow) {
      counts = records[row].last_step != step;
    } else {
      const WaitingRow seen = FindWaiting(filter, hash, key);
      // A Bloom filter does not know the last step: it counts a key in each lookup.
      counts = seen.next_step != step + 1;
      frequency = seen.count + (counts && seen.count != INT64_MAX ? 1 : 0);
      is_refused = filter.filter_freq > 1 && frequency < filter.filter_freq;
    }
  }
  const bool is_present = row != kNoRow;
  const bool is_admitted = is_key && !is_present && !is_refused;
  AggregatedIncrement(warp, is_present, &out.counts->present);
  AggregatedIncrement(warp, is_present && counts, &out.counts->found);
  AggregatedIncrement(warp, is_refused && counts, &out.counts->counted);
  const uint32_t refused = AggregatedIncrement(warp, is_refused, &out.counts->refused);
  if (is_refused) out.refused[refused] = unique[i];
  const uint32_t admitted = AggregatedIncrement(warp, is_admitted, &out.counts->admitted);
  if (is_admitted) {
    out.admitted[admitted] = unique[i];
    out.frequencies[admitted] = frequency;
  }
}

__global__ void __launch_bounds__(kThreads)
    AddRecordsKernel(DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                     const int64_t* frequencies, int64_t num_keys, int64_t step) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  records[rows[i]] = {keys[i], frequencies == nullptr ? 0 : frequencies[i], step, 0};
}

__global__ void __launch_bounds__(kThreads)
    CountRowsKernel(DeviceRecord* records, const uint32_t* rows, Count num_rows, int64_t step) {
  const int64_t i = GlobalThread();
  if (i >= num_rows.Get() || rows[i] == kNoRow) return;
  DeviceRecord& record = records[rows[i]];
  if (record.last_step == step) return;
  ++record.frequency;
  record.last_step = step;
}

__global__ void __launch_bounds__(kThreads)
    CountWaitingKernel(TableRef waiting, const uint32_t* rows, int64_t num_rows, int64_t step) {
  const int64_t i = GlobalThread();
  if (i >= num_rows) return;
  WaitingRow& seen = *WaitingRowAt(waiting, rows[i]);
  if (seen.next_step == step + 1) return;
  ++seen.count;
  seen.next_step = step + 1;
}

__global__ void __launch_bounds__(kThreads)
    CountInBloomKernel(FilterRef filter, const uint64_t* unique, int64_t num_keys) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const BloomPlaces places(filter.bloom, HashKey(unique[i]));
  for (int number = 0; number < filter.bloom.num_hashes; ++number) {
    if (places.IsNew(number)) CountUp(filter, places[number]);
  }
}

__global__ void __launch_bounds__(kThreads)
    RemoveRecordsKernel(DeviceRecord* records, const uint32_t* rows, int64_t num_rows) {
  const int64_t i = GlobalThread();
  if (i < num_rows && rows[i] != kNoRow) records[rows[i]].last_step = -1;
}

__global__ void __launch_bounds__(kThreads)
    FlagInsertedKernel(const uint32_t* rows_before, const int32_t* inverse,
                       const uint32_t* rows_now, const uint8_t* first, int64_t num_keys,
                       uint8_t* inserted) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const bool is_new = rows_before[inverse[i]] == kNoRow && rows_now[i] != kNoRow;
  inserted[i] = is_new && first[i] != 0 ? 1 : 0;
}

__global__ void __launch_bounds__(kThreads)
    MarkRowsKernel(const uint32_t* rows, Count num_rows, uint32_t* bits) {
  const int64_t i = GlobalThread();
  if (i >= num_rows.Get() || rows[i] == kNoRow) return;
  atomicOr(&bits[rows[i] / 32], 1u << (rows[i] % 32));
}

__global__ void __launch_bounds__(kThreads)
    CountNoRowKernel(const uint32_t* rows, Count num_rows, unsigned long long* count) {
  const int64_t i = GlobalThread();
  if (i >= num_rows.Get() || rows[i] != kNoRow) return;
  const cg::coalesced_group together = cg::coalesced_threads();
  if (together.thread_rank() == 0) {
    atomicAdd(count, static_cast<unsigned long long>(together.size()));
  }
}

__global__ void __launch_bounds__(kThreads)
    ReadSeenKernel(TableRef table, const DeviceRecord* records, FilterRef filter,
                   const uint64_t* keys, int64_t num_keys, uint8_t* present, int64_t* frequencies,
                   int64_t* last_steps) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const uint64_t key = keys[i];
  const uint64_t hash = HashKey(key);
  const uint32_t row = FindRow(ReadOnlyMemory(), table.index, hash, key);
  present[i] = row != kNoRow ? 1 : 0;
  if (row != kNoRow) {
    frequencies[i] = records[row].frequency;
    last_steps[i] = records[row].last_step;
  } else {
    const WaitingRow seen = FindWaiting(filter, hash, key);
    frequencies[i] = seen.count;
    last_steps[i] = seen.next_step - 1;
  }
}

__global__ void __launch_bounds__(kThreads)
    WriteScoresKernel(DeviceRecord* records, const uint32_t* rows, const uint8_t* last,
                      const int64_t* scores, int64_t num_keys, uint32_t* num_present) {
  const int64_t i = GlobalThread();
  if (i >= num_keys || rows[i] == kNoRow) return;
  AggregatedIncrement(num_present);
  if (last[i] != 0) records[rows[i]].score = scores[i];
}

__global__ void __launch_bounds__(kThreads)
    GatherKeysKernel(const DeviceRecord* records, const uint32_t* rows, int64_t num_rows,
                     uint64_t* keys) {
  const int64_t i = GlobalThread();
  if (i < num_rows) keys[i] = records[rows[i]].key;
}

__global__ void __launch_bounds__(kThreads)
    GatherRecordsKernel(const DeviceRecord* records, const uint32_t* rows, int64_t num_rows,
                        DeviceRecord* out) {
  const int64_t i = GlobalThread();
  if (i < num_rows) out[i] = records[rows[i]];
}

__global__ void __launch_bounds__(kThreads)
    WriteRecordsKernel(DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                       const int64_t* values, bool with_scores, int64_t num_rows) {
  const int64_t i = GlobalThread();
  if (i >= num_rows) return;
  const int64_t last_step = values[3 * i + 1];
  records[rows[i]] = {keys[i], values[3 * i], last_step < 0 ? 0 : last_step,
                      with_scores ? values[3 * i + 2] : 0};
}

__global__ void __launch_bounds__(kThreads)
    ListOutlivedKernel(const DeviceRecord* records, Count all_rows, int64_t step,
                       int64_t steps_to_live, bool weighs, uint32_t* outlived,
                       uint32_t* num_outlived, uint32_t* others, uint32_t* num_others) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread();
  const int64_t last_step = i < all_rows.Get() ? records[i].last_step : -1;
  const bool is_outlived = last_step >= 0 && IsOutlived(step, last_step, steps_to_live);
  const bool is_other = last_step >= 0 && !is_outlived && weighs;
  const uint32_t outlived_place = AggregatedIncrement(warp, is_outlived, num_outlived);
  if (is_outlived) outlived[outlived_place] = static_cast<uint32_t>(i);
  const uint32_t other_place = AggregatedIncrement(warp, is_other, num_others);
  if (is_other) others[other_place] = static_cast<uint32_t>(i);
}

// One warp per row. The squares are added from the first column on, as on the CPU: each lane
// computes one of 32, and every lane adds all of them.
__global__ void __launch_bounds__(kThreads)
    ListLightKernel(TableRef table, Count num_rows, const uint32_t* rows, float l2_threshold,
                    uint32_t* light, uint32_t* num_light) {
  const auto warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
  const int64_t i = GlobalThread() / kWarp;
  if (i >= num_rows.Get()) return;  // the whole warp
  const float* const row = table.Row(rows[i]);
  double sum = 0.0;
  for (int64_t first = 0; first < table.dim; first += kWarp) {
    const int64_t d = first + warp.thread_rank();
    const double value = d < table.dim ? static_cast<double>(row[d]) : 0.0;
    const double square = value * value;
    const int in_row = static_cast<int>(table.dim - first < kWarp ? table.dim - first : kWarp);
    for (int lane = 0; lane < in_row; ++lane) sum += warp.shfl(square, lane);
  }
  if (warp.thread_rank() == 0 && 0.5 * sum < l2_threshold)
    light[AggregatedIncrement(num_light)] = rows[i];
}

__global__ void __launch_bounds__(kThreads)
    ListOutlivedWaitingKernel(TableRef waiting, const uint64_t* keys, const uint32_t* rows,
                              int64_t num_keys, int64_t step, int64_t steps_to_live,
                              uint64_t* outlived, uint32_t* num_outlived) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const int64_t last_step = WaitingRowAt(waiting, rows[i])->next_step - 1;
  if (IsOutlived(step, last_step, steps_to_live))
    outlived[AggregatedIncrement(num_outlived)] = keys[i];
}

}  // namespace

void ClassifyKeys(Stream stream, const TableRef& table, const DeviceRecord* records,
                  const FilterRef& filter, const uint64_t* unique, Count num_unique, int64_t step,
                  const ClassifiedKeys& out) {
  FillWithZeros(stream, out.counts, sizeof(BatchCounts));
  Launch(ClassifyKernel, num_unique.most, stream, table, records, filter, unique, num_unique, step,
         out);
}

void AddRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                const int64_t* frequencies, int64_t num_keys, int64_t step) {
  Launch(AddRecordsKernel, num_keys, stream, records, keys, rows, frequencies, num_keys, step);
}

void CountRows(Stream stream, DeviceRecord* records, const uint32_t* rows, Count num_rows,
               int64_t step) {
  Launch(CountRowsKernel, num_rows.most, stream, records, rows, num_rows, step);
}

void CountWaiting(Stream stream, const TableRef& waiting, const uint32_t* rows, int64_t num_rows,
                  int64_t step) {
  Launch(CountWaitingKernel, num_rows, stream, waiting, rows, num_rows, step);
}

void CountInBloom(Stream stream, const FilterRef& filter, const uint64_t* unique,
                  int64_t num_keys) {
  Launch(CountInBloomKernel, num_keys, stream, filter, unique, num_keys);
}

void RemoveRecords(Stream stream, DeviceRecord* records, const uint32_t* rows, int64_t num_rows) {
  Launch(RemoveRecordsKernel, num_rows, stream, records, rows, num_rows);
}

void FlagInserted(Stream stream, const KeyBatch& batch, const uint32_t* rows_now,
                  const uint8_t* first, uint8_t* inserted) {
  Launch(FlagInsertedKernel, batch.num_keys, stream, batch.classified.rows, batch.inverse, rows_now,
         first, batch.num_keys, inserted);
}

void MarkRows(Stream stream, const uint32_t* rows, Count num_rows, uint32_t* bits) {
  Launch(MarkRowsKernel, num_rows.most, stream, rows, num_rows, bits);
}

void CountNoRow(Stream stream, const uint32_t* rows, Count num_rows, unsigned long long* count) {
  Launch(CountNoRowKernel, num_rows.most, stream, rows, num_rows, count);
}

void ReadSeen(Stream stream, const TableRef& table, const DeviceRecord* records,
              const FilterRef& filter, const uint64_t* keys, int64_t num_keys, uint8_t* present,
              int64_t* frequencies, int64_t* last_steps) {
  Launch(ReadSeenKernel, num_keys, stream, table, records, filter, keys, num_keys, present,
         frequencies, last_steps);
}

void WriteScores(Stream stream, DeviceRecord* records, const uint32_t* rows, const uint8_t* last,
                 const int64_t* scores, int64_t num_keys, uint32_t* num_present) {
  Launch(WriteScoresKernel, num_keys, stream, records, rows, last, scores, num_keys, num_present);
}

void GatherKeys(Stream stream, const DeviceRecord* records, const uint32_t* rows, int64_t num_rows,
                uint64_t* keys) {
  Launch(GatherKeysKernel, num_rows, stream, records, rows, num_rows, keys);
}

void GatherRecords(Stream stream, const DeviceRecord* records, const uint32_t* rows,
                   int64_t num_rows, DeviceRecord* out) {
  Launch(GatherRecordsKernel, num_rows, stream, records, rows, num_rows, out);
}

void WriteRecords(Stream stream, DeviceRecord* records, const uint64_t* keys, const uint32_t* rows,
                  const int64_t* values, bool with_scores, int64_t num_rows) {
  Launch(WriteRecordsKernel, num_rows, stream, records, keys, rows, values, with_scores, num_rows);
}

void ListEvictable(Stream stream, const TableRef& table, const DeviceRecord* records,
                   Count all_rows, int64_t step, int64_t steps_to_live, float l2_threshold,
                   uint32_t* rows, uint32_t* num_rows, uint32_t* scratch, uint32_t* num_scratch) {
  const bool weighs = l2_threshold >= 0.0f;
  Launch(ListOutlivedKernel, all_rows.most, stream, records, all_rows, step, steps_to_live, weighs,
         rows, num_rows, scratch, num_scratch);
  if (!weighs) return;
  Launch(ListLightKernel, all_rows.most * kWarp, stream, table, Count(all_rows.most, num_scratch),
         scratch, l2_threshold, rows, num_rows);
}

void ListOutlivedWaiting(Stream stream, const TableRef& waiting, const uint64_t* keys,
                         const uint32_t* rows, int64_t num_keys, int64_t step,
                         int64_t steps_to_live, uint64_t* outlived, uint32_t* num_outlived) {
  Launch(ListOutlivedWaitingKernel, num_keys, stream, waiting, keys, rows, num_keys, step,
         steps_to_live, outlived, num_outlived);
}

}  // namespace cuda
}  // namespace sok
