// Other hash tables on a device, with the sizes of `benchmarks/gpu_table.py`: 1M keys per call, rows
// of 32 floats, 2^27 slots. Compile it beside their headers, which are not part of this project:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 --extended-lambda --expt-relaxed-constexpr \
//     -I HierarchicalKV/include -I cuCollections/include benchmarks/gpu_peers.cu -o gpu_peers -lcuda
//   ./gpu_peers 27 0.5 0.75 0.95
//
// -DNO_HKV or -DNO_CUCO leaves one of them out. HierarchicalKV's `find`, `find_or_insert` and
// `insert_or_assign` copy rows, as our calls do. cuCollections' `static_map` has no rows: it maps a
// key to a number of 4 bytes, so it is to be compared with an index alone. A time is the median of 5
// bursts of 20 calls between two events, after one burst to warm up; `insert` is timed once over the
// last 8 batches of new keys, as there.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>
#ifndef NO_HKV
#include <merlin_hashtable.cuh>
#endif
#ifndef NO_CUCO
#include <cuco/static_map.cuh>
#endif

namespace {

constexpr int64_t kFactor = 2654435761;
constexpr size_t kBatch = 1 << 20;
constexpr size_t kDim = 32;
constexpr int kBatches = 8, kCalls = 20, kRepeats = 5;

void Check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

template <class T>
struct Array {
  explicit Array(size_t size) : size(size) { Check(cudaMalloc(&data, size * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    Check(cudaMemcpy(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice));
  }
  Array(const Array&) = delete;
  ~Array() { cudaFree(data); }
  T* data;
  size_t size;
};

// Seconds per call of `calls` calls.
template <class Call>
double Burst(int calls, const Call& call) {
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  Check(cudaDeviceSynchronize());
  Check(cudaEventRecord(begin));
  for (int i = 0; i < calls; ++i) call(i);
  Check(cudaEventRecord(end));
  Check(cudaEventSynchronize(end));
  float milliseconds;
  Check(cudaEventElapsedTime(&milliseconds, begin, end));
  return milliseconds / 1e3 / calls;
}

template <class Call>
double Median(const Call& call) {
  std::vector<double> times;
  for (int i = 0; i <= kRepeats; ++i) times.push_back(Burst(kCalls, call));
  std::sort(times.begin() + 1, times.end());
  return times[1 + kRepeats / 2];
}

void Report(const std::string& name, double load, double seconds) {
  std::printf("%-32s load %.2f %8.3f billion keys/s %8.3f ms\n", name.c_str(), load,
              kBatch / seconds / 1e9, seconds * 1e3);
  std::fflush(stdout);
}

__global__ void WriteKeys(size_t first, int64_t* keys) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  keys[i] = static_cast<int64_t>(first + i) * kFactor;
}

// Batches of the keys 0 to `num_keys` - 1 in turn, and of random ones of them.
struct Keys {
  Keys(size_t num_keys, std::mt19937_64* random) : num_parts(num_keys / kBatch) {
    std::vector<int64_t> values(kBatch * kBatches);
    for (int64_t& value : values) value = static_cast<int64_t>((*random)() % num_keys) * kFactor;
    present = std::make_unique<Array<int64_t>>(values);
  }
  void Upload(size_t part, int64_t* keys) const {
    WriteKeys<<<kBatch / 256, 256>>>(part * kBatch, keys);
    Check(cudaGetLastError());
  }
  const int64_t* Batch(int call) const { return present->data + (call % kBatches) * kBatch; }
  size_t num_parts;
  std::unique_ptr<Array<int64_t>> present;
};

// Inserts all batches by `insert(keys)`; times the last `kBatches`.
template <class Insert>
double Fill(const Keys& keys, const Insert& insert) {
  Array<int64_t> batch(kBatch), last(kBatch * kBatches);
  const size_t first = keys.num_parts - kBatches;
  for (size_t part = 0; part < first; ++part) {
    keys.Upload(part, batch.data);
    insert(batch.data);
    Check(cudaDeviceSynchronize());
  }
  for (int i = 0; i < kBatches; ++i) keys.Upload(first + i, last.data + i * kBatch);
  return Burst(kBatches, [&](int i) { insert(last.data + i * kBatch); });
}

#ifndef NO_HKV
void HierarchicalKV(size_t slots, double load) {
  using Table = nv::merlin::HashTable<uint64_t, float, uint64_t, nv::merlin::EvictStrategy::kLru>;
  nv::merlin::HashTableOptions options;
  options.init_capacity = options.max_capacity = slots;
  options.max_hbm_for_vectors = slots * kDim * 4 + (size_t{1} << 30);
  options.dim = kDim;
  options.max_load_factor = 1.0f;
  options.num_of_buckets_per_alloc = slots / options.max_bucket_size;  // one allocation, not a million
  Table table;
  table.init(options);
  std::mt19937_64 random(0);
  const Keys keys(static_cast<size_t>(load * slots), &random);
  Array<float> rows(kBatch * kDim);
  Array<bool> found(kBatch);
  Check(cudaMemset(rows.data, 0, rows.size * 4));
  const double insert = Fill(keys, [&](const int64_t* batch) {
    table.insert_or_assign(kBatch, reinterpret_cast<const uint64_t*>(batch), rows.data);
  });
  Report("HierarchicalKV insert_or_assign", load, insert);
  Report("HierarchicalKV find", load, Median([&](int i) {
           table.find(kBatch, reinterpret_cast<const uint64_t*>(keys.Batch(i)), rows.data,
                      found.data);
         }));
  Report("HierarchicalKV find_or_insert", load, Median([&](int i) {
           table.find_or_insert(kBatch, reinterpret_cast<const uint64_t*>(keys.Batch(i)),
                                rows.data);
         }));
}
#endif

#ifndef NO_CUCO
void StaticMap(size_t slots, double load) {
  auto map = cuco::static_map{cuco::extent<size_t>{slots}, cuco::empty_key<int64_t>{-1},
                              cuco::empty_value<int32_t>{-1}};
  std::mt19937_64 random(0);
  const Keys keys(static_cast<size_t>(load * slots), &random);
  Array<int32_t> numbers(kBatch);
  Array<cuco::pair<int64_t, int32_t>> pairs(kBatch);
  const double insert = Fill(keys, [&](const int64_t* batch) {
    auto pair = thrust::make_transform_iterator(
        thrust::counting_iterator<size_t>(0), [batch] __device__(size_t i) {
          return cuco::pair<int64_t, int32_t>{batch[i], static_cast<int32_t>(i)};
        });
    map.insert_async(pair, pair + kBatch);
  });
  Report("static_map insert, no rows", load, insert);
  Report("static_map find, no rows", load, Median([&](int i) {
           map.find_async(keys.Batch(i), keys.Batch(i) + kBatch, numbers.data);
         }));
}
#endif

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: gpu_peers LOG2_SLOTS LOAD...\n");
    return 2;
  }
  const size_t slots = size_t{1} << std::atoi(argv[1]);
  for (int i = 2; i < argc; ++i) {
    const double load = std::atof(argv[i]);
#ifndef NO_HKV
    HierarchicalKV(slots, load);
#endif
#ifndef NO_CUCO
    StaticMap(slots, load);
#endif
  }
}
