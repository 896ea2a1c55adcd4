#include <cooperative_groups.h>

#include "cpp/core/cuda/device/aggregated_increment.cuh"
#include "cpp/core/cuda/device/jobs.cuh"
#include "cpp/core/cuda/index/bucket_memory.cuh"
#include "cpp/core/cuda/index/probe.h"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_access.cuh"

namespace sok {
namespace cuda {
namespace {

namespace cg = cooperative_groups;

// Row number of a new key. The stack and next_row do not change while a batch is inserted; the
// counters are updated afterwards.
struct NewRow {
  Counters* counters;
  const uint32_t* free_rows;

  SOK_DEVICE uint32_t operator()() const {
    const uint32_t place = AggregatedIncrement(&counters->num_inserted);
    const uint32_t num_free = counters->num_free;
    return place < num_free ? free_rows[num_free - 1 - place]
                            : counters->next_row + (place - num_free);
  }
};

struct FindKeysJob : FindKeysBatch {
  int64_t NumThreads() const { return num_keys.most; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= num_keys.Get()) return;
    const uint64_t key = keys[i];
    rows[i] = FindRow(ReadOnlyMemory(), table.index, HashKey(key), key);
  }
};

// Each lane inserts a key, then the warp writes the new rows.
struct InsertJob {
  TableRef table;
  const uint64_t* keys;
  Count num_keys;
  uint32_t* rows;
  uint8_t* inserted;

  int64_t NumThreads() const { return num_keys.most; }
  SOK_DEVICE void Run(int64_t i) const {
    const Warp warp = cg::tiled_partition<kWarp>(cg::this_thread_block());
    uint64_t key = 0;
    float* new_row = nullptr;
    if (i < num_keys.Get()) {
      key = keys[i];
      bool is_new;
      const uint32_t row = FindOrInsertRow(ContendedMemory(), table.index, HashKey(key), key,
                                           NewRow{table.counters, table.free_rows}, &is_new);
      rows[i] = row;
      if (inserted != nullptr) inserted[i] = is_new ? 1 : 0;
      if (is_new) new_row = table.Row(row);
    }
    WriteNewRows(warp, table, key, new_row);
  }
};

// Adds the keys that a batch inserted to the counters: free row numbers were used first. Writes to
// the host by itself: a copy of so few bytes would delay the stream for longer.
struct UpdateCountersJob {
  Counters* counters;
  Counters* host_counters;

  int64_t NumThreads() const { return 1; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i != 0) return;
    Counters now = *counters;
    const uint32_t from_free = now.num_inserted < now.num_free ? now.num_inserted : now.num_free;
    now.num_free -= from_free;
    now.next_row += now.num_inserted - from_free;
    now.used += now.num_inserted;
    now.size += now.num_inserted;
    now.num_inserted = 0;
    *counters = now;
    if (host_counters != nullptr) *host_counters = now;
  }
};

struct CountMissesJob {
  TableRef table;
  const uint64_t* keys;
  Count num_keys;
  uint32_t* num_missing;

  int64_t NumThreads() const { return num_keys.most; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i >= num_keys.Get()) return;
    const uint64_t key = keys[i];
    if (FindRow(ReadOnlyMemory(), table.index, HashKey(key), key) == kNoRow) {
      AggregatedIncrement(num_missing);
    }
  }
};

struct CopyCountersJob {
  const Counters* from;
  Counters* to;

  int64_t NumThreads() const { return 1; }
  SOK_DEVICE void Run(int64_t i) const {
    if (i == 0) *to = *from;
  }
};

__global__ void __launch_bounds__(kThreads)
    EraseKeysKernel(TableRef table, const uint64_t* keys, int64_t num_keys) {
  const int64_t i = GlobalThread();
  if (i >= num_keys) return;
  const uint64_t key = keys[i];
  const uint32_t row = EraseRow(ContendedMemory(), table.index, HashKey(key), key);
  if (row == kNoRow) return;
  table.free_rows[AggregatedIncrement(&table.counters->num_free)] = row;
  atomicAdd(&table.counters->erased, 1u);
}

__global__ void BookErasedKernel(Counters* counters) {
  if (threadIdx.x == 0) counters->size -= counters->erased;
}

// The bucket of the i-th slot of an index if the slot holds a key; else null.
SOK_DEVICE const Bucket* BucketWithKey(const IndexRef& index, int64_t i, int* slot) {
  const uint64_t b = static_cast<uint64_t>(i) / kBucketSlots;
  if (b > index.mask) return nullptr;
  *slot = static_cast<int>(i % kBucketSlots);
  const uint32_t digest = index.buckets[b].digests[*slot / 4] >> (*slot % 4 * 8) & 0xFF;
  return digest > kErasedDigest ? index.buckets + b : nullptr;
}

// One thread per slot of the old index.
__global__ void __launch_bounds__(kThreads) RehashKernel(IndexRef from, IndexRef to) {
  int slot;
  const Bucket* const bucket = BucketWithKey(from, GlobalThread(), &slot);
  if (bucket == nullptr) return;
  const uint64_t key = bucket->keys[slot];
  InsertUniqueRow(ContendedMemory(), to, HashKey(key), key, bucket->rows[slot] - 1);
}

__global__ void BookRehashKernel(Counters* counters) {
  if (threadIdx.x == 0) counters->used = counters->size;
}

__global__ void __launch_bounds__(kThreads)
    ListKeysKernel(IndexRef index, uint64_t* keys, uint32_t* rows, uint32_t* cursor) {
  int slot;
  const Bucket* const bucket = BucketWithKey(index, GlobalThread(), &slot);
  if (bucket == nullptr) return;
  const uint32_t place = AggregatedIncrement(cursor);
  keys[place] = bucket->keys[slot];
  rows[place] = bucket->rows[slot] - 1;
}

__global__ void __launch_bounds__(kThreads)
    ProbeLengthsKernel(IndexRef index, ProbeLengths* lengths) {
  int slot;
  const Bucket* const bucket = BucketWithKey(index, GlobalThread(), &slot);
  if (bucket == nullptr) return;
  unsigned long long length = 1;  // NOLINT
  uint64_t step = 0;
  const Bucket* visited = index.Home(HashKey(bucket->keys[slot]));
  while (visited != bucket) {
    visited = index.Next(visited, &step);
    ++length;
  }
  atomicAdd(&lengths->total, length);
  atomicMax(&lengths->most, length);
}

__global__ void __launch_bounds__(kThreads)
    CountMissingKernel(const uint32_t* rows, const uint8_t* first, int64_t num_keys,
                       uint32_t* count) {
  const int64_t i = GlobalThread();
  if (i < num_keys && rows[i] == kNoRow && first[i] != 0) AggregatedIncrement(count);
}

int64_t NumSlots(const IndexRef& index) {
  return (static_cast<int64_t>(index.mask) + 1) * kBucketSlots;
}

}  // namespace

void FindKeys(Stream stream, const std::vector<FindKeysBatch>& batches) {
  std::vector<FindKeysJob> jobs;
  for (const FindKeysBatch& batch : batches) jobs.push_back({batch});
  LaunchJobs(stream, jobs);
}

void InsertKeys(Stream stream, const std::vector<InsertBatch>& batches) {
  std::vector<InsertJob> inserts;
  std::vector<UpdateCountersJob> bookings;
  for (const InsertBatch& batch : batches) {
    inserts.push_back({batch.table, batch.keys, batch.num_keys, batch.rows, batch.inserted});
    bookings.push_back({batch.table.counters, batch.host_counters});
  }
  LaunchJobs(stream, inserts);
  LaunchJobs(stream, bookings);
}

void CountMisses(Stream stream, const std::vector<MissBatch>& batches, Misses* misses) {
  FillWithZeros(stream, misses, batches.size() * sizeof(Misses));
  std::vector<CountMissesJob> counts;
  std::vector<CopyCountersJob> copies;
  for (const MissBatch& batch : batches) {
    Misses* const found = misses + counts.size();
    counts.push_back({batch.table, batch.keys, batch.num_keys, &found->num_missing});
    copies.push_back({batch.table.counters, &found->counters});
  }
  LaunchJobs(stream, counts);
  LaunchJobs(stream, copies);
}

void EraseKeys(Stream stream, const TableRef& table, const uint64_t* keys, int64_t num_keys) {
  FillWithZeros(stream, &table.counters->erased, sizeof(uint32_t));
  Launch(EraseKeysKernel, num_keys, stream, table, keys, num_keys);
  Launch(BookErasedKernel, 1, stream, table.counters);
}

void Rehash(Stream stream, const IndexRef& from, const IndexRef& to, Counters* counters) {
  Launch(RehashKernel, NumSlots(from), stream, from, to);
  Launch(BookRehashKernel, 1, stream, counters);
}

void ListKeys(Stream stream, const IndexRef& index, uint64_t* keys, uint32_t* rows,
              uint32_t* cursor) {
  Launch(ListKeysKernel, NumSlots(index), stream, index, keys, rows, cursor);
}

void AddProbeLengths(Stream stream, const IndexRef& index, ProbeLengths* lengths) {
  Launch(ProbeLengthsKernel, NumSlots(index), stream, index, lengths);
}

void CountMissing(Stream stream, const uint32_t* rows, const uint8_t* first, int64_t num_keys,
                  uint32_t* count) {
  Launch(CountMissingKernel, num_keys, stream, rows, first, num_keys, count);
}

}  // namespace cuda
}  // namespace sok
