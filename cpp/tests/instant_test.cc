// A reader beside writers: the bits that a locked reader would have read when it was opened, whatever
// changes the table meanwhile.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/lookup.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

constexpr int64_t kDim = 8;
constexpr uint64_t kKeys = 3000;

// A table that trains, and what may happen to it.
class Changed {
 public:
  Changed(const TableOptions& options, const OptimizerOptions& optimizer)
      : table(std::make_unique<CpuTable>(options)), optimizer_(optimizer) {
    for (int i = 0; i < 60; ++i) Train(200);
    if (options.use_hashtable) Erase(300);  // rows that are free at the instant
  }

  std::vector<uint64_t> Draw(int64_t n) {
    std::vector<uint64_t> keys(static_cast<size_t>(n));
    const bool hashed = table->options().use_hashtable;
    for (uint64_t& key : keys) key = random_() % kKeys * (hashed ? 0x9e3779b97f4a7c15ull : 1);
    return keys;
  }
  std::vector<float> Rows(int64_t n) {
    std::vector<float> rows(static_cast<size_t>(n * kDim));
    for (float& value : rows) value = static_cast<float>(random_() % 1000) / 1000.0f;
    return rows;
  }

  void LookUp(int64_t n) {
    const std::vector<uint64_t> keys = Draw(n);
    std::vector<int32_t> inverse(keys.size());
    std::vector<uint64_t> unique(keys.size());
    std::vector<float> out(static_cast<size_t>(n * kDim));
    std::vector<FeatureLookup> features(1);
    features[0].table = table.get();
    features[0].keys = keys.data();
    features[0].samples.num_keys = n;
    features[0].samples.combiner = Combiner::kNone;
    features[0].inverse = inverse.data();
    features[0].unique_keys = unique.data();
    features[0].out = out.data();
    LookupGroup(ex_, &features, /*insert=*/true);
  }
  void Train(int64_t n) {
    LookUp(n);
    const std::vector<uint64_t> keys = Draw(n);
    const std::vector<float> grads = Rows(n);
    ApplyGradients(ex_, *table, optimizer_, 0.1f, ++step_, keys.data(), grads.data(), n);
  }
  void FindOrInsert(int64_t n) {
    const std::vector<uint64_t> keys = Draw(n);
    std::vector<float> rows(static_cast<size_t>(n * kDim));
    table->FindOrInsert(ex_, keys.data(), n, rows.data(), nullptr);
  }
  void Assign(int64_t n) {
    const std::vector<uint64_t> keys = Draw(n);
    table->Assign(ex_, keys.data(), n, Rows(n).data());
  }
  // So many new keys that the present ones among them are found by inserting them.
  void AssignNew() {
    std::vector<uint64_t> keys = Draw(1);
    for (uint64_t i = 0; i < 2000; ++i) keys.push_back((kKeys + 2000 * ++fresh_ + i) * 77);
    std::swap(keys[0], keys[7]);
    const int64_t n = static_cast<int64_t>(keys.size());
    table->Assign(ex_, keys.data(), n, Rows(n).data());
  }
  void Erase(int64_t n) {
    const std::vector<uint64_t> keys = Draw(n);
    table->Erase(ex_, keys.data(), n);
  }
  void Import(int64_t n, bool replace) {
    TableSnapshot some;
    some.keys = Draw(n);
    some.rows = Rows(n);
    if (table->keeps_records()) some.policy.records.assign(static_cast<size_t>(3 * n), 5);
    table->Import(ex_, some, replace);
  }
  void Delta() {
    const std::unique_ptr<TableReader> reader = table->OpenChanges(ex_, since);
    since = reader->about().number;
  }
  void Score() {
    const std::vector<uint64_t> keys = Draw(50);
    const std::vector<int64_t> scores(50, ++step_);
    table->AssignScores(ex_, keys.data(), 50, scores.data());
  }
  void OtherSlots() {
    std::vector<SlotVariableSpec> slots = table->Slots();
    slots.push_back({"more" + std::to_string(slots.size()), 3, 0.5f, true});
    std::rotate(slots.begin(), slots.end() - 1, slots.end());
    table->ConfigureSlots(ex_, slots);
    optimizer_step_ends = true;  // the next optimizer would need its slots in front
  }
  void Evict() { table->Evict(ex_); }
  void Clear() { table->Clear(ex_); }
  void Export() { table->Export(ex_, true); }

  std::unique_ptr<CpuTable> table;
  int64_t since = 0;
  bool optimizer_step_ends = false;

 private:
  InlineExecutor ex_;
  const OptimizerOptions optimizer_;
  std::mt19937_64 random_{5};
  int64_t step_ = 0;
  uint64_t fresh_ = 0;
};

TableSnapshot ReadAll(TableReader* reader, bool records, const std::function<void()>& between) {
  InlineExecutor ex;
  between();
  reader->ReadWaiting();
  TableSnapshot all = reader->about().snapshot;
  const int64_t n = reader->num_keys(), width = all.slot_width(), part = n / 9 + 1;
  all.keys.resize(static_cast<size_t>(n));
  all.rows.resize(static_cast<size_t>(n * kDim));
  all.slot_rows.resize(static_cast<size_t>(n * width));
  if (records) all.policy.records.resize(static_cast<size_t>(3 * n));
  for (int64_t first = 0; first < n; first += part) {
    const int64_t count = std::min(part, n - first);
    uint64_t* const keys = all.keys.data() + first;
    between();
    reader->ReadKeys(ex, count, keys);
    between();
    reader->ReadRows(ex, first, keys, count, all.rows.data() + first * kDim,
                     width == 0 ? nullptr : all.slot_rows.data() + first * width,
                     records ? all.policy.records.data() + 3 * first : nullptr);
  }
  return all;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  // memcmp takes no null pointer, not even for no bytes.
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void CheckSame(const TableSnapshot& a, const TableSnapshot& b) {
  CHECK(a.keys == b.keys && !a.keys.empty());
  CHECK(SameBits(a.rows, b.rows));
  CHECK(a.slot_names == b.slot_names && SameBits(a.slot_rows, b.slot_rows));
  CHECK(a.policy.records == b.policy.records && a.policy.counters == b.policy.counters);
  CHECK_EQ(a.policy.waiting.size(), b.policy.waiting.size());
  for (size_t i = 0; i < a.policy.waiting.size(); ++i) {
    const WaitingKey &one = a.policy.waiting[i], &other = b.policy.waiting[i];
    CHECK(one.key == other.key && one.count == other.count && one.last_step == other.last_step);
  }
  CHECK(a.policy.step == b.policy.step && a.optimizer_step == b.optimizer_step);
  CHECK(a.initial_row_scale == b.initial_row_scale);
}

struct Kind {
  std::string name;
  TableOptions table;
  OptimizerOptions optimizer;
};

std::vector<Kind> Kinds() {
  std::vector<Kind> kinds;
  const auto add = [&](const char* name, OptimizerKind kind, auto&& change) {
    Kind each;
    each.name = each.table.name = name;
    each.table.dim = kDim;
    each.optimizer.kind = kind;
    change(each);
    kinds.push_back(each);
  };
  add("sgd", OptimizerKind::kSgd, [](Kind&) {});
  add("adagrad", OptimizerKind::kAdagrad, [](Kind&) {});
  add("adam", OptimizerKind::kAdam, [](Kind&) {});
  add("lazy", OptimizerKind::kLazyAdam, [](Kind&) {});
  add("momentum", OptimizerKind::kMomentum, [](Kind& kind) { kind.optimizer.momentum = 0.9f; });
  add("decayed", OptimizerKind::kSgd, [](Kind& kind) { kind.optimizer.weight_decay = 0.1f; });
  add("narrow", OptimizerKind::kAdagrad,
      [](Kind& kind) { kind.table.row_type = RowType::kBfloat16; });
  for (const bool decays : {false, true}) {
    add(decays ? "direct_decayed" : "direct", OptimizerKind::kAdagrad, [&](Kind& kind) {
      kind.table.use_hashtable = false;
      kind.table.max_capacity = kKeys;
      if (decays) kind.optimizer.weight_decay = 0.1f;
    });
  }
  add("filter", OptimizerKind::kAdam, [](Kind& kind) { kind.table.policy.filter_freq = 2; });
  add("bloom", OptimizerKind::kAdagrad, [](Kind& kind) {
    kind.table.policy.filter_freq = 2;
    kind.table.policy.bloom_max_keys = 5000;
  });
  add("lru", OptimizerKind::kAdam, [](Kind& kind) {
    kind.table.policy.score = ScoreKind::kLru;
    kind.table.policy.evicted_buffer = 10;
    kind.table.max_capacity = 2200;
  });
  add("custom", OptimizerKind::kSgd, [](Kind& kind) {
    kind.table.policy.score = ScoreKind::kCustom;
    kind.table.max_capacity = 2800;
  });
  add("outlived", OptimizerKind::kAdagrad, [](Kind& kind) {
    kind.table.policy.steps_to_live = 40;
    kind.table.policy.l2_threshold = 0.4f;
  });
  add("disk", OptimizerKind::kAdam, [](Kind& kind) {
    kind.table.storage.path = std::filesystem::current_path().string() + "/instant_test_rows";
    kind.table.storage.memory_bytes = 128 << 10;
  });
  return kinds;
}

using Change = std::pair<std::string, std::function<void(Changed&)>>;

// Each is one way by which rows change.
std::vector<Change> Changes(const Kind& kind) {
  const bool hashed = kind.table.use_hashtable, records = CpuTable(kind.table).keeps_records();
  std::vector<Change> changes = {
      {"train", [](Changed& c) { c.Train(150); }},
      {"look up", [](Changed& c) { c.LookUp(150); }},
      {"find or insert", [](Changed& c) { c.FindOrInsert(150); }},
      {"export", [](Changed& c) { c.LookUp(50), c.Export(); }},
      {"delta", [](Changed& c) { c.Delta(); }},
      {"clear", [](Changed& c) { c.Clear(), c.Train(100); }},
      {"other slots", [](Changed& c) { c.OtherSlots(); }},
  };
  if (kind.table.max_capacity == 0 || !hashed) {
    changes.push_back({"assign", [](Changed& c) { c.Assign(150); }});
    changes.push_back({"import", [](Changed& c) { c.Import(150, false); }});
    changes.push_back({"restore", [](Changed& c) { c.Import(150, true), c.Train(50); }});
  }
  if (hashed) changes.push_back({"erase", [](Changed& c) { c.Erase(150), c.Train(50); }});
  if (hashed && kind.table.max_capacity == 0) {
    changes.push_back({"assign new", [](Changed& c) { c.AssignNew(); }});
  }
  if (records) changes.push_back({"evict", [](Changed& c) { c.Train(10), c.Evict(); }});
  if (kind.table.policy.score == ScoreKind::kCustom) {
    changes.push_back({"score", [](Changed& c) { c.Score(); }});
  }
  return changes;
}

// Between the parts, on the reader's thread.
void TestEachChange() {
  InlineExecutor ex;
  for (const Kind& kind : Kinds()) {
    for (const auto& [what, change] : Changes(kind)) {
      Changed changed(kind.table, kind.optimizer);
      changed.Delta();
      const bool records = changed.table->keeps_records();
      std::fprintf(stderr, "%s, %s\n", kind.name.c_str(), what.c_str());
      for (int round = 0; round < 3; ++round) {  // later ones use the memory of the first
        changed.Train(kKeys);                    // after a clear, too, there are keys
        if (changed.table->options().policy.evicts_on_call()) changed.Evict();
        const TableSnapshot at = changed.table->Export(ex, true);
        if (round > 0 && at.keys.empty()) break;  // cleared, and the new rows have too small a norm
        std::unique_ptr<TableReader> reader = changed.table->OpenChanges(ex, 0, /*beside=*/true);
        changed.since = reader->about().number;
        const TableSnapshot read = ReadAll(reader.get(), records, [&, &change = change] {
          if (!changed.optimizer_step_ends) change(changed);
        });
        CheckSame(read, at);
        CHECK_THROWS(changed.table->OpenChanges(ex, 0, true), std::invalid_argument, "second one");
        if (changed.optimizer_step_ends) break;
      }
      CHECK_THROWS(changed.table->OpenChanges(ex, changed.since, true), std::invalid_argument,
                   "since=");
    }
  }
}

// On another thread, all the time; the changes since the instant complete what was read.
void TestRaces() {
  InlineExecutor ex;
  for (const Kind& kind : Kinds()) {
    Changed changed(kind.table, kind.optimizer);
    const bool records = changed.table->keeps_records();
    if (changed.table->options().policy.evicts_on_call()) changed.Evict();
    const TableSnapshot at = changed.table->Export(ex, true);
    std::unique_ptr<TableReader> reader = changed.table->OpenChanges(ex, 0, /*beside=*/true);
    changed.since = reader->about().number;
    const std::vector<Change> changes = Changes(kind);
    std::atomic<int64_t> count{0};
    std::atomic<bool> ends{false};
    std::thread writer([&] {
      std::mt19937 which(3);
      for (; !ends && !changed.optimizer_step_ends; ++count) {
        const int64_t rare = count % 97 == 96 ? static_cast<int64_t>(changes.size()) : 4;
        if (const auto& [what, change] = changes[which() % rare]; what != "other slots") {
          change(changed);
        }
      }
    });
    while (count < 3) std::this_thread::yield();
    const TableSnapshot read = ReadAll(reader.get(), records, [&] {
      const int64_t before = count;
      while (count < before + 5) std::this_thread::yield();
    });
    reader.reset();
    ends = true;
    writer.join();
    std::fprintf(stderr, "%s: %d changes\n", kind.name.c_str(), static_cast<int>(count));
    CheckSame(read, at);
    CHECK(changed.table->OpenChanges(ex, changed.since)->about().number > changed.since);
  }
}

// Shards grow while their keys are listed: several times, as the reader takes few buckets at a time.
void TestGrowsWhileKeysAreListed() {
  constexpr uint64_t kNum = 3'000'000, kBatch = 100'000;
  InlineExecutor ex;
  TableOptions options;
  options.name = "grows";
  options.dim = 1;
  CpuTable table(options);
  std::vector<uint64_t> keys(kNum), found(kNum);
  for (uint64_t i = 0; i < kNum; ++i) keys[i] = 2 * i;
  const std::vector<float> rows(kNum, 1.0f);
  table.Assign(ex, keys.data(), kNum, rows.data());
  const std::unique_ptr<TableReader> reader = table.OpenChanges(ex, 0, true);
  std::thread writer([&] {
    InlineExecutor own;
    std::vector<uint64_t> batch(kBatch);
    for (uint64_t first = 0; first < 2 * kNum; first += kBatch) {
      for (uint64_t i = 0; i < kBatch; ++i) batch[i] = 2 * (first + i) + 1;
      table.Assign(own, batch.data(), kBatch, rows.data());
      for (uint64_t i = 0; i < kBatch; ++i) batch[i] = 2 * ((first / 16 + i) % kNum);
      table.Erase(own, batch.data(), kBatch / 50);
    }
  });
  reader->ReadKeys(ex, kNum, found.data());
  writer.join();
  CHECK(found == keys);
}

// Writers wait while more copies wait for the reader than may; also writers of several tables, whose
// readers are not read at the same time.
void TestWritersWaitForRoom() {
  constexpr int64_t kWide = 1024, kNum = 20'000, kBatch = 100;  // 80 MB; 40 MB may wait
  InlineExecutor ex;
  std::vector<std::unique_ptr<CpuTable>> tables;
  std::vector<uint64_t> keys(kNum);
  for (int64_t i = 0; i < kNum; ++i) keys[i] = static_cast<uint64_t>(i);
  const std::vector<float> rows(kNum * kWide, 1.0f);
  for (const char* name : {"one", "other"}) {
    TableOptions options;
    options.name = name;
    options.dim = kWide;
    tables.push_back(std::make_unique<CpuTable>(options));
    tables.back()->Assign(ex, keys.data(), kNum, rows.data());
  }
  std::vector<std::unique_ptr<TableReader>> readers;
  for (const auto& table : tables) readers.push_back(table->OpenChanges(ex, 0, true));
  std::atomic<int64_t> written{0};
  std::thread writer([&] {
    InlineExecutor own;
    const std::vector<float> grads(kBatch * kWide, 1.0f);
    for (int64_t first = 0; first < kNum; first += kBatch) {
      const uint64_t* const batch = keys.data() + first;
      ApplyGradients(own,
                     {{tables[0].get(), batch, grads.data(), kBatch},
                      {tables[1].get(), batch, grads.data(), kBatch}},
                     OptimizerOptions(), 1.0f, first / kBatch + 1);
      written = first + kBatch;
    }
  });
  while (written < kNum / 2) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK_EQ(written.load(), kNum / 2 + kBatch);
  for (const std::unique_ptr<TableReader>& reader : readers) {
    std::vector<uint64_t> part(1000);
    std::vector<float> read(1000 * kWide);
    for (int64_t first = 0; first < kNum; first += 1000) {
      reader->ReadKeys(ex, 1000, part.data());
      reader->ReadRows(ex, first, part.data(), 1000, read.data(), nullptr, nullptr);
      CHECK(std::all_of(read.begin(), read.end(), [](float value) { return value == 1.0f; }));
    }
  }
  writer.join();  // the readers still exist, and have nothing to copy
  CHECK(written == kNum);
}

// The table keeps the memory of copies for its next instant, if they were not more than may wait.
void TestMemoryIsKept() {
  constexpr int64_t kWide = 1024, kNum = 20'000, kRowBytes = kWide * 4;
  InlineExecutor ex;
  TableOptions options;
  options.name = "kept";
  options.dim = kWide;
  CpuTable table(options);
  std::vector<uint64_t> keys(kNum);
  for (int64_t i = 0; i < kNum; ++i) keys[i] = static_cast<uint64_t>(i);
  std::vector<float> rows(kNum * kWide, 1.0f);
  table.Assign(ex, keys.data(), kNum, rows.data());
  table.OpenChanges(ex, 0);
  const auto bytes = [&] { return table.Stats(ex).bytes; };
  const int64_t before = bytes();
  const auto copy_rows = [&](int64_t n) {
    const std::unique_ptr<TableReader> reader = table.OpenChanges(ex, 0, true);
    table.Assign(ex, keys.data(), n, rows.data());
    return bytes();
  };
  const int64_t most = kNum / 2 * 9 / 8, few = int64_t{4} << 20;  // `few`: all but rows
  const int64_t at_peak = copy_rows(kNum / 8);
  CHECK(at_peak >= before + kNum / 8 * kRowBytes);
  CHECK(bytes() >= before + kNum / 8 * kRowBytes);
  CHECK(copy_rows(kNum / 8) <= at_peak + few);
  CHECK(copy_rows(kNum) >= before + kNum * kRowBytes);
  CHECK(bytes() >= before + kNum / 2 * kRowBytes && bytes() <= before + most * kRowBytes + few);
  table.Clear(ex);
  CHECK(bytes() <= before + few - kNum * kRowBytes);
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestRaces();
  sok::TestGrowsWhileKeysAreListed();
  sok::TestWritersWaitForRoom();
  sok::TestMemoryIsKept();
  sok::TestEachChange();
}
