// Rows on disk: the bits of a table in memory, whatever is called, and memory that stays bounded.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/arena.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr int64_t kDim = 64, kKeys = 3000, kBatch = 80;
constexpr int64_t kMemory = 128 << 10;  // of rows that take 4 to 16 times as much

// In the directory of the test: that of temporary files may be in memory.
std::string Folder() { return std::filesystem::current_path().string() + "/storage_test_rows"; }

TableOptions Options(bool on_disk) {
  TableOptions options;
  options.name = "table";
  options.dim = kDim;
  options.seed = 3;
  if (on_disk) {
    options.storage.path = Folder();
    options.storage.memory_bytes = kMemory;
  }
  return options;
}

bool IsEqual(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void CheckEqual(const TableSnapshot& a, const TableSnapshot& b) {
  CHECK(a.keys == b.keys);
  CHECK(IsEqual(a.rows, b.rows));
  CHECK(a.slot_names == b.slot_names);
  CHECK(IsEqual(a.slot_rows, b.slot_rows));
  CHECK(a.policy.records == b.policy.records);
}

// Two tables of the same calls, of which one is on disk.
class Pair {
 public:
  Pair(TableOptions options, Executor& ex, int seed) : ex_(ex), random_(seed) {
    options.storage = StorageOptions();
    memory_ = std::make_unique<CpuTable>(options);
    options.storage = Options(true).storage;
    options.storage.memory_bytes = kMemory / 4;  // filters keep most keys out
    disk_ = std::make_unique<CpuTable>(options);
  }

  CpuTable& disk() { return *disk_; }
  CpuTable& memory() { return *memory_; }

  // Key numbers near 0 are drawn more often, as under Zipf's law.
  std::vector<uint64_t> Draw(int64_t n) {
    std::vector<uint64_t> keys(n);
    for (uint64_t& key : keys) {
      const uint64_t a = random_() % kKeys, b = random_() % kKeys;
      key = memory_->options().use_hashtable ? std::min(a, b) * 0x9e3779b97f4a7c15ull
                                             : std::min(a, b);
    }
    return keys;
  }
  std::vector<float> Floats(int64_t n) {
    std::vector<float> values(n);
    for (float& value : values) value = std::normal_distribution<float>()(random_);
    return values;
  }

  template <typename Call>
  void Both(const Call& call) {
    CHECK(IsEqual(call(*memory_), call(*disk_)));
    CHECK_EQ(memory_->size(), disk_->size());
  }

  void Lookup(bool insert) {
    const std::vector<uint64_t> keys = Draw(kBatch);
    Both([&](CpuTable& table) {
      std::vector<uint64_t> unique(kBatch);
      std::vector<int32_t> inverse(kBatch);
      std::vector<float> out(kBatch * kDim);
      std::vector<FeatureLookup> features(1);
      features[0].table = &table;
      features[0].keys = keys.data();
      features[0].samples.num_keys = kBatch;
      features[0].samples.combiner = Combiner::kNone;
      features[0].inverse = inverse.data();
      features[0].unique_keys = unique.data();
      features[0].out = out.data();
      LookupGroup(ex_, &features, insert);
      return out;
    });
  }
  void Read() {
    const std::vector<uint64_t> keys = Draw(kBatch);
    Both([&](CpuTable& table) {
      std::vector<float> rows(kBatch * kDim);
      table.Find(ex_, keys.data(), kBatch, rows.data(), nullptr);
      return rows;
    });
  }
  void Insert() {
    const std::vector<uint64_t> keys = Draw(kBatch);
    Both([&](CpuTable& table) {
      std::vector<float> rows(kBatch * kDim);
      table.FindOrInsert(ex_, keys.data(), kBatch, rows.data(), nullptr);
      return rows;
    });
  }
  void Assign() {
    const std::vector<uint64_t> keys = Draw(kBatch);
    const std::vector<float> rows = Floats(kBatch * kDim);
    Both([&](CpuTable& table) {
      table.Assign(ex_, keys.data(), kBatch, rows.data());
      return std::vector<float>();
    });
  }
  void Erase() {
    const std::vector<uint64_t> keys = Draw(kBatch / 4);
    Both([&](CpuTable& table) {
      return std::vector<float>{static_cast<float>(table.Erase(ex_, keys.data(), kBatch / 4))};
    });
  }
  void Step(const OptimizerOptions& optimizer) {
    ++step_;
    const std::vector<uint64_t> keys = Draw(kBatch);
    const std::vector<float> grads = Floats(kBatch * kDim);
    Both([&](CpuTable& table) {
      ApplyGradients(ex_, table, optimizer, 0.1f / step_, step_, keys.data(), grads.data(), kBatch);
      return std::vector<float>();
    });
  }
  void Evict() {
    Both([&](CpuTable& table) {
      std::vector<float> out{static_cast<float>(table.Evict(ex_))};
      const EvictedRows popped = table.PopEvicted();
      out.insert(out.end(), popped.rows.begin(), popped.rows.end());
      out.insert(out.end(), popped.slot_rows.begin(), popped.slot_rows.end());
      return out;
    });
  }
  void Restore(bool replace) {
    const TableSnapshot saved = memory_->Export(ex_, true);
    CheckEqual(saved, disk_->Export(ex_, true));
    for (CpuTable* table : {memory_.get(), disk_.get()}) table->Import(ex_, saved, replace);
    Compare();
  }
  void ReadInParts() {
    const auto read = [&](CpuTable& table) {
      const std::unique_ptr<TableReader> reader = table.OpenContent(ex_, true);
      const int64_t n = reader->num_keys(), width = reader->about().snapshot.slot_width();
      std::vector<float> all;
      for (int64_t first = 0; first < n; first += 700) {
        const int64_t count = std::min<int64_t>(700, n - first);
        std::vector<uint64_t> keys(count);
        std::vector<float> rows(count * kDim), slot_rows(count * width);
        reader->ReadKeys(ex_, count, keys.data());
        reader->ReadRows(ex_, first, keys.data(), count, rows.data(), slot_rows.data(), nullptr);
        all.insert(all.end(), rows.begin(), rows.end());
        all.insert(all.end(), slot_rows.begin(), slot_rows.end());
      }
      return all;
    };
    Both(read);
  }
  void Changes() {
    const auto read = [&](CpuTable& table) {
      int64_t& since = &table == memory_.get() ? since_[0] : since_[1];
      const std::unique_ptr<TableReader> reader = table.OpenChanges(ex_, since);
      since = reader->about().number;
      const int64_t n = reader->num_keys();
      std::vector<uint64_t> keys(n);
      std::vector<float> rows(n * kDim);
      reader->ReadKeys(ex_, n, keys.data());
      reader->ReadRows(ex_, 0, keys.data(), n, rows.data(), nullptr, nullptr);
      return rows;
    };
    Both(read);
  }
  void Compare() { CheckEqual(memory_->Export(ex_, true), disk_->Export(ex_, true)); }
  void Clear() {
    memory_->Clear(ex_);
    disk_->Clear(ex_);
    CHECK_EQ(disk_->Stats(ex_).storage.file_bytes, 0);
  }

 private:
  Executor& ex_;
  std::mt19937_64 random_;
  std::unique_ptr<CpuTable> memory_, disk_;
  int64_t step_ = 0;
  int64_t since_[2] = {0, 0};
};

void RandomCalls(const TableOptions& options, const OptimizerOptions& optimizer, Executor& ex,
                 int seed) {
  Pair pair(options, ex, seed);
  std::mt19937 which(seed);
  const bool has_index = options.use_hashtable, keeps = options.policy.keeps_records();
  for (int i = 0; i < 60; ++i) {
    switch (which() % 14) {
      case 0:
        pair.Insert();
        break;
      case 1:
        pair.Assign();
        break;
      case 2:
        if (has_index) pair.Erase();
        break;
      case 3:
        pair.Read();
        break;
      case 4:
        pair.Lookup(/*insert=*/false);
        break;
      case 5:
        if (keeps) pair.Evict();
        break;
      case 6:
        if (has_index) pair.Changes();
        break;
      case 7:
        pair.ReadInParts();
        break;
      default:
        pair.Lookup(/*insert=*/true);
        pair.Step(optimizer);
    }
    if (i % 20 == 19) pair.Compare();
  }
  CHECK(pair.disk().Stats(ex).storage.blocks_evicted > 0);
  CHECK(pair.disk().Stats(ex).storage.bytes_read > 0);
  pair.Restore(/*replace=*/false);
  pair.Step(optimizer);
  pair.Restore(/*replace=*/true);
  pair.Lookup(true);
  pair.Step(optimizer);
  pair.Clear();
  pair.Lookup(true);
  pair.Step(optimizer);
  pair.Compare();
}

void EveryRuleHasTheBitsOfMemory() {
  InlineExecutor one;
  ThreadPool two(2);
  int seed = 0;
  for (const char* rule : {"sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "lazy_adam",
                           "ftrl", "adagrad_decay", "rmsprop"}) {
    OptimizerOptions optimizer;
    optimizer.kind = ParseOptimizerKind(rule);
    if (std::strcmp(rule, "momentum") == 0) optimizer.momentum = 0.9f;
    if (std::strcmp(rule, "sgd") == 0) optimizer.weight_decay = 0.01f;
    Executor& ex = ++seed % 2 ? static_cast<Executor&>(two) : one;
    RandomCalls(Options(false), optimizer, ex, seed);
    TableOptions direct = Options(false);
    direct.use_hashtable = false;
    direct.max_capacity = kKeys;
    if (seed % 4 == 1) RandomCalls(direct, optimizer, ex, seed);
    TableOptions policies = Options(false);
    policies.max_capacity = kKeys / 2;
    policies.policy.score = ScoreKind::kLfu;
    policies.policy.steps_to_live = 30;
    policies.policy.l2_threshold = seed % 4 == 1 ? 0.02f : -1.0f;
    policies.policy.filter_freq = 2;
    policies.policy.evicted_buffer = 300;
    RandomCalls(policies, optimizer, ex, seed);
  }
}

// Of mapped files without a name, as the system counts them.
int64_t MappedBytes() {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool counts = false;
  int64_t kib = 0;
  while (std::getline(maps, line)) {
    if (line.find('-') < line.find(' ')) counts = line.find("(deleted)") != std::string::npos;
    if (counts && line.rfind("Rss:", 0) == 0) kib += std::atoll(line.c_str() + 4);
  }
  return kib << 10;
}

void MemoryStaysBounded(bool lfu) {
  ThreadPool pool(2);
  TableOptions options = Options(true);
  options.storage.lfu = lfu;
  CpuTable table(options);
  std::mt19937_64 random(1);
  OptimizerOptions optimizer;
  optimizer.kind = ParseOptimizerKind("adagrad");
  const std::vector<float> grads(kBatch * kDim, 0.5f);
  const int64_t row_bytes = 2 * kDim * 4;
  int64_t most = 0, most_mapped = 0;
  for (int64_t step = 1; step < 200; ++step) {
    std::vector<uint64_t> keys(kBatch);
    for (uint64_t& key : keys) key = random() % (16 * kMemory / row_bytes);
    ApplyGradients(pool, table, optimizer, 0.1f, step, keys.data(), grads.data(), kBatch);
    if (step <= 100) continue;
    most = std::max(most, table.Stats(pool).storage.resident_bytes);
    most_mapped = std::max(most_mapped, MappedBytes());
  }
  const StorageStats stats = table.Stats(pool).storage;
  CHECK(stats.file_bytes >= 12 * kMemory);
  // A batch's rows and those before, each in a block of its own.
  CHECK(most <= kMemory + 2 * kBatch * RowBlockBytes());
  CHECK(most_mapped > 0);
  CHECK(most_mapped <= kMemory + 2 * kBatch * RowBlockBytes());
  const TableSnapshot all = table.Export(pool, true);
  CHECK(table.Stats(pool).storage.resident_bytes <= kMemory + 2 * kBatch * RowBlockBytes());
  CHECK(MappedBytes() <= kMemory + 2 * kBatch * RowBlockBytes());
  CHECK(stats.bytes_written > 0);
}

// What fits in memory is not read again.
void HotRowsStay() {
  InlineExecutor ex;
  TableOptions options = Options(true);
  options.storage.memory_bytes = 4 * kMemory;
  CpuTable table(options);
  std::vector<float> rows(kBatch * kDim);
  std::vector<uint64_t> hot(kBatch), cold(kBatch);
  for (int64_t i = 0; i < kBatch; ++i) hot[i] = i;
  uint64_t next = 1000;
  for (int round = 0; round < 500; ++round) {
    for (uint64_t& key : cold) key = next++;
    table.FindOrInsert(ex, hot.data(), kBatch, rows.data(), nullptr);
    table.FindOrInsert(ex, cold.data(), kBatch, rows.data(), nullptr);
  }
  CHECK(table.Stats(ex).storage.blocks_evicted > 1000);
  CHECK(table.Stats(ex).storage.bytes_read < 100 * RowBlockBytes());
  table.Export(ex, true);  // a scan
  const int64_t before = table.Stats(ex).storage.bytes_read;
  table.FindOrInsert(ex, hot.data(), kBatch, rows.data(), nullptr);
  CHECK(table.Stats(ex).storage.bytes_read - before <= 2 * RowBlockBytes());
}

void AFullDiskNamesWhatItNeeds() {
  InlineExecutor ex;
  std::vector<float> rows(1000 * kDim);
  std::vector<uint64_t> keys(1000);
  const auto insert = [&](CpuTable& table, uint64_t first) {
    for (int64_t i = 0; i < 1000; ++i) keys[i] = first + i;
    table.FindOrInsert(ex, keys.data(), 1000, rows.data(), nullptr);
  };
  const auto fill = [&](CpuTable& table) {
    for (uint64_t first = 1000; first < 100000; first += 1000) insert(table, first);
  };
  struct rlimit before, low;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, SIG_IGN);
  for (bool by_option : {false, true}) {
    TableOptions options = Options(true);
    if (by_option) options.storage.file_bytes = 5 << 20;
    CpuTable table(options);
    insert(table, 0);
    const std::vector<float> expected = rows;
    low = before;
    low.rlim_cur = 5 << 20;
    if (!by_option) CHECK_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
    CHECK_THROWS(fill(table), std::length_error, "bytes for its rows on disk");
    CHECK_THROWS(fill(table), std::length_error, "(table 'table')");
    CHECK_THROWS(fill(table), std::length_error, by_option ? "storage_size" : Folder());
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    const int64_t size = table.size();
    insert(table, 0);
    CHECK(IsEqual(rows, expected));
    CHECK_EQ(table.size(), size);
    if (!by_option) insert(table, 200000);
  }
}

void WhatCannotBeIsRefused() {
  TableOptions options = Options(true);
  options.storage.path = "/proc/none";
  CHECK_THROWS(CpuTable{options}, std::invalid_argument, "`storage_path`");
  if (std::filesystem::is_directory("/dev/shm")) {
    options.storage.path = "/dev/shm";
    CHECK_THROWS(CpuTable{options}, std::invalid_argument, "must be on a disk");
  }
  options = Options(true);
  options.storage.memory_bytes = 0;
  CHECK_THROWS(CpuTable{options}, std::invalid_argument, "`storage_size`");
}

// Of a process: files below the folder that are open; whether none of them has a name.
int64_t NamelessFiles(pid_t process) {
  int64_t found = 0;
  const std::string fds = "/proc/" + std::to_string(process) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(fds)) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.compare(0, Folder().size(), Folder()) != 0) continue;
    struct stat info;
    CHECK_EQ(stat(entry.path().c_str(), &info), 0);
    CHECK_EQ(static_cast<int64_t>(info.st_nlink), int64_t{0});
    CHECK(info.st_blocks > 0);
    ++found;
  }
  return found;
}

// A file without a name takes space for as long as a process has it open, so one that is killed
// leaves nothing. Each table has its own.
void TheFileGoesWithTheProcess() {
  int pipes[2];
  CHECK_EQ(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    InlineExecutor ex;
    CpuTable table(Options(true)), other(Options(true));
    const std::vector<uint64_t> keys{1, 2, 3};
    std::vector<float> rows(keys.size() * kDim);
    table.FindOrInsert(ex, keys.data(), 3, rows.data(), nullptr);
    other.FindOrInsert(ex, keys.data(), 3, rows.data(), nullptr);
    CHECK_EQ(write(pipes[1], "x", 1), 1);
    pause();
  }
  char byte;
  CHECK_EQ(read(pipes[0], &byte, 1), 1);
  CHECK_EQ(NamelessFiles(child), int64_t{2});
  CHECK(std::filesystem::is_empty(Folder()));
  kill(child, SIGKILL);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  CHECK(std::filesystem::is_empty(Folder()));
}

// A child of fork must not write into its parent's rows: it ends, as it has none.
void RowsAreOfOneProcess() {
  InlineExecutor ex;
  CpuTable table(Options(true));
  const std::vector<uint64_t> keys{1, 2, 3};
  std::vector<float> rows(keys.size() * kDim), ones(keys.size() * kDim, 1.0f);
  table.Assign(ex, keys.data(), 3, ones.data());
  const pid_t child = fork();
  if (child == 0) {
    const std::vector<float> zeros(keys.size() * kDim);
    table.Assign(ex, keys.data(), 3, zeros.data());
    _exit(0);
  }
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  table.Find(ex, keys.data(), 3, rows.data(), nullptr);
  CHECK(IsEqual(rows, ones));
}

}  // namespace
}  // namespace sok

int main() {
  std::filesystem::create_directories(sok::Folder());
  sok::TheFileGoesWithTheProcess();
  sok::RowsAreOfOneProcess();
  sok::WhatCannotBeIsRefused();
  sok::AFullDiskNamesWhatItNeeds();
  sok::MemoryStaysBounded(/*lfu=*/true);
  sok::MemoryStaysBounded(/*lfu=*/false);
  sok::HotRowsStay();
  sok::EveryRuleHasTheBitsOfMemory();
  std::filesystem::remove_all(sok::Folder());
  return 0;
}
