// Calls on the same tables and the same pool at once: nobody waits for ever, and nobody for long.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cpu/table.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

// A pool like TensorFlow's: its threads run all ranges, the caller sleeps.
class SleepingCallerPool final : public Executor {
 public:
  explicit SleepingCallerPool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~SleepingCallerPool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int num_threads() const override { return static_cast<int>(threads_.size()); }
  void ParallelFor(int64_t n, int64_t grain, RangeFunction fn) override {
    CheckMayWaitForPool();
    const int64_t block = std::max(grain, (n + 4 * num_threads() - 1) / (4 * num_threads()));
    int64_t left = (n + block - 1) / block;
    std::unique_lock<std::mutex> lock(mutex_);
    for (int64_t begin = 0; begin < n; begin += block) {
      ranges_.push_back([this, fn, begin, end = std::min(n, begin + block), &left] {
        fn(begin, end);
        const std::lock_guard<std::mutex> counts(mutex_);
        --left;
        changed_.notify_all();
      });
    }
    changed_.notify_all();
    changed_.wait(lock, [&left] { return left == 0; });
  }

 private:
  void Work() {
    const InRange in_range;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !ranges_.empty(); });
      if (ranges_.empty()) return;
      const std::function<void()> range = std::move(ranges_.front());
      ranges_.pop_front();
      lock.unlock();
      range();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> ranges_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// Groups of tables on disk, evaluated by several threads: rows are brought while others wait.
void TablesOnDiskAreReadAtOnce() {
  constexpr int64_t kTables = 10, kKeys = 100000, kBatch = 500, kDim = 16;
  // Not in the directory of temporary files, which may be in memory.
  const std::string folder = std::filesystem::current_path().string() + "/waiting_test_rows";
  SleepingCallerPool pool(2);
  std::vector<std::unique_ptr<CpuTable>> tables;
  std::vector<float> rows(kKeys * kDim, 0.5f);
  std::vector<uint64_t> all(kKeys);
  for (int64_t k = 0; k < kKeys; ++k) all[k] = k;
  for (int t = 0; t < kTables; ++t) {
    TableOptions options;
    options.name = "t" + std::to_string(t);
    options.dim = kDim;
    options.storage.path = folder;
    options.storage.memory_bytes = 64 << 10;
    tables.push_back(std::make_unique<CpuTable>(options));
    tables.back()->Assign(pool, all.data(), kKeys, rows.data());
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      std::vector<std::vector<uint64_t>> keys(kTables, std::vector<uint64_t>(kBatch));
      std::vector<std::vector<float>> out(kTables, std::vector<float>(kBatch * kDim));
      for (int round = 0; round < 10; ++round) {
        std::vector<FeatureLookup> lookups(kTables);
        for (int t = 0; t < kTables; ++t) {
          for (uint64_t& key : keys[t]) key = random() % kKeys;
          lookups[t].table = tables[t].get();
          lookups[t].keys = keys[t].data();
          lookups[t].samples.num_keys = kBatch;
          lookups[t].samples.combiner = Combiner::kNone;
          lookups[t].out = out[t].data();
        }
        LookupGroup(pool, &lookups, /*insert=*/false);
        for (const std::vector<float>& of_table : out) {
          for (float x : of_table) CHECK_EQ(x, 0.5f);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& table : tables) CHECK(table->Stats(pool).storage.blocks_evicted > 0);
  std::filesystem::remove_all(folder);
}

// What could make calls wait for each other is refused whether or not it would this time.
void RulesAreChecked() {
  ThreadPool pool(2);
  InlineExecutor inline_executor;
  TableOptions options;
  options.name = "t";
  options.dim = 2;
  CpuTable table(options);
  std::atomic<int> calls{0};
  const auto count = [&](int64_t, int64_t) { ++calls; };
  for (const int64_t n : {1, 100}) {
    const auto in_range = [&](const std::function<void()>& fn) {
      pool.ParallelFor(n, 1, [&fn](int64_t, int64_t) { fn(); });
    };
    CHECK_THROWS(in_range([&] { pool.ParallelFor(n, 1, count); }), std::logic_error, "itself");
    CHECK_THROWS(in_range([&] { table.mutex().lock(); }), std::logic_error, "table's lock");
    CHECK_THROWS(in_range([&] { table.mutex().lock_shared(); }), std::logic_error, "table's lock");
    LeafMutex leaf;
    const std::lock_guard<LeafMutex> lock(leaf);
    CHECK_THROWS(pool.ParallelFor(n, 1, count), std::logic_error, "LeafMutex");
    CHECK_EQ(calls.load(), 0);
    inline_executor.ParallelFor(n, 1, count);
    CHECK_EQ(calls.exchange(0), 1);
  }
  pool.ParallelFor(100, 1, [&](int64_t, int64_t) {
    LeafMutex leaf;
    const std::lock_guard<LeafMutex> lock(leaf);
    inline_executor.ParallelFor(10, 1, count);
  });
  CHECK(calls > 0);
  table.mutex().lock();  // what failed has left nothing behind
  table.mutex().unlock();
}

// Of threads that call without a pause, those of the other kind get their turn.
void ReadersAndWritersTakeTurns() {
  constexpr int64_t kKeys = 2000, kDim = 4, kTurns = 20, kMost = 20000;
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  for (const bool writes : {true, false}) {  // what the one thread does; four do the other
    CpuTable table(options);
    std::vector<uint64_t> keys(kKeys);
    for (int64_t k = 0; k < kKeys; ++k) keys[k] = k;
    const auto call = [&](bool write) {
      InlineExecutor ex;
      std::vector<float> rows(kKeys * kDim);
      if (write) {
        table.Assign(ex, keys.data(), kKeys, rows.data());
      } else {
        table.Find(ex, keys.data(), kKeys, rows.data(), nullptr);
      }
    };
    call(true);
    std::atomic<int64_t> others{0};
    std::atomic<bool> is_done{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        while (!is_done && others < kMost) {
          call(!writes);
          ++others;
        }
      });
    }
    while (others < 100) std::this_thread::yield();
    for (int64_t turn = 0; turn < kTurns; ++turn) call(writes);
    is_done = true;
    for (std::thread& thread : threads) thread.join();
    CHECK(others < kMost);
  }
}

// A reader that holds the table's instant lets its thread and others read, though a writer waits.
void AHolderMayReadAgain() {
  InlineExecutor ex;
  TableOptions options;
  options.name = "t";
  options.dim = 2;
  CpuTable table(options);
  const std::vector<uint64_t> keys{1, 2, 3};
  std::vector<float> rows(6, 1.0f), read(6);
  table.Assign(ex, keys.data(), 3, rows.data());
  std::unique_ptr<TableReader> reader = table.OpenContent(ex, false);
  std::atomic<bool> is_written{false};
  const std::vector<float> twos(6, 2.0f);
  std::thread writer([&] {
    table.Assign(ex, keys.data(), 3, twos.data());
    is_written = true;
  });
  for (int round = 0; round < 100; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the writer has come meanwhile
    table.Find(ex, keys.data(), 3, read.data(), nullptr);
    CHECK(read == rows && !is_written);
  }
  std::thread([&] { reader = nullptr; }).join();  // any thread may release it
  writer.join();
  table.Find(ex, keys.data(), 3, read.data(), nullptr);
  CHECK(read == twos);
}

}  // namespace
}  // namespace sok

int main() {
  alarm(300);  // a hang is a failure
  sok::TablesOnDiskAreReadAtOnce();
  sok::RulesAreChecked();
  sok::ReadersAndWritersTakeTurns();
  sok::AHolderMayReadAgain();
  return 0;
}
