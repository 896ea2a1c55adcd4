// Times of the table's calls, beside std::unordered_map on the same keys.
//
//     table_benchmark [num_threads]        medians over the rounds
//
// insert: 2M new keys in batches of 65,536, dim 16, from an empty table (FindOrInsertRows)
// find:   65,536 random warm keys of those 2M, rows copied out (Find)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/hash.h"
#include "cpp/core/initializer.h"

namespace sok {
namespace {

constexpr int64_t kNumKeys = 2000000;
constexpr int64_t kBatch = 65536;
constexpr int64_t kDim = 16;

struct Times {
  double wall = 0, cpu = 0;  // ms; CPU time of all threads, the better figure on a busy machine
  Times& operator+=(const Times& other) {
    wall += other.wall;
    cpu += other.cpu;
    return *this;
  }
  bool operator<(const Times& other) const { return wall < other.wall; }
};

double CpuMilliseconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

Times Measure(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  const double cpu = CpuMilliseconds();
  fn();
  const std::chrono::duration<double, std::milli> wall = std::chrono::steady_clock::now() - start;
  return {wall.count(), CpuMilliseconds() - cpu};
}

// Least and median wall time, and CPU time of the least.
std::string Text(std::vector<Times> times) {
  std::sort(times.begin(), times.end());
  char text[96];
  std::snprintf(text, sizeof text, "%.2f ms (least %.2f, CPU %.2f)", times[times.size() / 2].wall,
                times[0].wall, times[0].cpu);
  return text;
}

std::vector<uint64_t> Sample(const std::vector<uint64_t>& keys, std::mt19937_64* random) {
  std::vector<uint64_t> batch(kBatch);
  for (uint64_t& key : batch) key = keys[(*random)() % keys.size()];
  return batch;
}

void Run(int num_threads) {
  ThreadPool pool(num_threads);
  std::vector<uint64_t> keys(kNumKeys);
  for (int64_t i = 0; i < kNumKeys; ++i) keys[i] = HashKey(static_cast<uint64_t>(i));
  std::mt19937_64 random(1);
  TableOptions options;
  options.name = "benchmark";
  options.dim = kDim;

  std::vector<Times> inserts;
  std::vector<uint32_t> row_numbers(kBatch);
  std::vector<float> rows(kBatch * kDim);
  double bytes_per_key = 0;
  for (int round = 0; round < 7; ++round) {
    CpuTable table(options);
    Times ms;
    double sum = 0;
    int num_batches = 0;
    for (int64_t b = 0; b < kNumKeys; b += kBatch) {
      const int64_t n = std::min(kBatch, kNumKeys - b);
      ms += Measure([&] {
        const std::unique_lock<std::shared_mutex> lock(table.mutex());
        table.FindOrInsertRows(pool, keys.data() + b, n, row_numbers.data(), nullptr);
      });
      const TableStats stats = table.Stats();
      const double bytes = static_cast<double>(stats.bytes - stats.size * kDim * 4) / stats.size;
      sum += bytes;
      ++num_batches;
      if (round == 0 && num_batches % 4 == 0) {
        std::printf("  %7ld keys: %5.1f bytes a key beside the row, load %.2f, probes %.3f\n",
                    static_cast<long>(stats.size), bytes, stats.load_factor,
                    stats.mean_probe_length);
      }
    }
    bytes_per_key = sum / num_batches;
    inserts.push_back(ms);
  }
  std::printf("insert %s (mean over the growth: %.1f bytes a key beside the row)\n",
              Text(inserts).c_str(), bytes_per_key);

  CpuTable table(options);
  for (int64_t b = 0; b < kNumKeys; b += kBatch) {
    table.FindOrInsert(pool, keys.data() + b, std::min(kBatch, kNumKeys - b), rows.data(), nullptr);
  }
  std::vector<Times> finds, find_rows, reinserts;
  for (int round = 0; round < 101; ++round) {
    const std::vector<uint64_t> batch = Sample(keys, &random);
    finds.push_back(Measure([&] { table.Find(pool, batch.data(), kBatch, rows.data(), nullptr); }));
    const std::vector<uint64_t> other = Sample(keys, &random);
    find_rows.push_back(
        Measure([&] { table.FindRows(pool, other.data(), kBatch, row_numbers.data()); }));
    reinserts.push_back(
        Measure([&] { table.FindOrInsert(pool, other.data(), kBatch, rows.data(), nullptr); }));
  }
  std::printf("find %s\nrow numbers only %s\nfind_or_insert of present keys %s\n",
              Text(finds).c_str(), Text(find_rows).c_str(), Text(reinserts).c_str());

  const Initializer init = MakeInitializer(options.initializer, 0, 0, kDim);
  std::vector<float*> pointers(kBatch);
  for (int64_t i = 0; i < kBatch; ++i) pointers[i] = rows.data() + i * kDim;
  for (const char* kind : {"uniform", "normal", "truncated_normal"}) {
    Initializer one = init;
    one.kind = ParseInitializerKind(kind);
    std::vector<Times> times;
    for (int round = 0; round < 21; ++round) {
      times.push_back(
          Measure([&] { InitialRows(one, keys.data(), kBatch, kDim, pointers.data()); }));
    }
    std::printf("initial rows, %s: %s for 65,536 x 16 on one thread\n", kind, Text(times).c_str());
  }

  std::unordered_map<uint64_t, std::vector<float>> map;
  std::printf("std::unordered_map, one thread: insert %s",
              Text({Measure([&] {
                for (uint64_t key : keys) map.emplace(key, std::vector<float>(kDim, 0.1f));
              })}).c_str());
  const std::vector<uint64_t> batch = Sample(keys, &random);
  std::printf(", find %s\n", Text({Measure([&] {
                               for (int64_t i = 0; i < kBatch; ++i) {
                                 const auto it = map.find(batch[i]);
                                 std::copy(it->second.begin(), it->second.end(),
                                           rows.begin() + i * kDim);
                               }
                             })}).c_str());
}

}  // namespace
}  // namespace sok

int main(int argc, char** argv) { sok::Run(argc > 1 ? std::atoi(argv[1]) : 2); }
