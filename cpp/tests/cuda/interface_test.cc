// The calls of core/table.h on a table in host memory and on one in (emulated) device memory: the
// checks are written once, and both must pass them.
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr int64_t kDim = 2;

TableOptions Options(bool with_policy) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.initializer.kind = InitializerKind::kConstant;
  options.initializer.a = 0.5f;
  options.policy.record = with_policy;
  return options;
}

// Keys and rows of one call. The device reads them.
struct Rows {
  std::vector<uint64_t> keys;
  std::vector<float> rows;
  std::vector<uint8_t> flags;

  int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

Rows Find(Table& table, CallContext context, const std::vector<uint64_t>& keys, bool insert) {
  Rows out{keys, std::vector<float>(keys.size() * kDim), std::vector<uint8_t>(keys.size())};
  if (insert) {
    table.FindOrInsert(context, keys.data(), out.size(), out.rows.data(), out.flags.data());
  } else {
    table.Find(context, keys.data(), out.size(), out.rows.data(), out.flags.data());
  }
  return out;
}

void RowsInAndOut(Table& table, CallContext context) {
  CHECK_EQ(table.dim(), kDim);
  Rows read = Find(table, context, {7, 7, 9}, /*insert=*/false);
  CHECK(read.rows == std::vector<float>(6, 0.5f));
  CHECK(read.flags == std::vector<uint8_t>(3, 0));
  CHECK_EQ(table.Size(context), 0);
  const std::vector<uint64_t> keys = {9, 7, 9};
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  table.Assign(context, keys.data(), 3, values.data());
  read = Find(table, context, {7, 8, 9}, /*insert=*/true);
  CHECK(read.rows == std::vector<float>({3, 4, 0.5f, 0.5f, 5, 6}));  // of equal keys the last wins
  CHECK(read.flags == std::vector<uint8_t>({0, 1, 0}));
  const std::vector<uint64_t> gone = {8, 8, 1};
  CHECK_EQ(table.Erase(context, gone.data(), 3), 1);
  CHECK_EQ(table.Size(context), 2);
  CHECK_EQ(table.Stats(context).size, 2);
  std::vector<float> zeros(4, 1.0f);
  table.WriteZeros(context, zeros.data(), 2);
  cuda::Synchronize(nullptr);
  CHECK(zeros == std::vector<float>(4, 0.0f));
}

void SlotsAndSnapshots(Table& table, CallContext context) {
  table.Clear(context);
  table.ConfigureSlots(context, {{"m", 1, 0.25f, true}, {"step", 1, 0.0f, false}});
  Find(table, context, {3, 1}, /*insert=*/true);
  TableSnapshot snapshot = table.Export(context, /*with_slots=*/true);
  CHECK(snapshot.keys == std::vector<uint64_t>({1, 3}));
  CHECK(snapshot.rows == std::vector<float>(4, 0.5f));
  CHECK(snapshot.slot_names == std::vector<std::string>({"m"}));
  CHECK(snapshot.slot_rows == std::vector<float>(2, 0.25f));
  CHECK(table.Export(context, /*with_slots=*/false).slot_names.empty());

  // A slot the table lacks is kept; of equal keys the last wins; others stay unless replaced.
  snapshot.keys = {5, 1, 5};
  snapshot.rows = {1, 1, 2, 2, 3, 3};
  snapshot.slot_names = {"v", "m"};
  snapshot.slot_widths = {2, 1};
  snapshot.slot_rows = {10, 11, 12, 20, 21, 22, 30, 31, 32};
  snapshot.policy = RecordSnapshot();
  table.Import(context, snapshot);
  const TableSnapshot merged = table.Export(context, true);
  CHECK(merged.keys == std::vector<uint64_t>({1, 3, 5}));
  CHECK(merged.rows == std::vector<float>({2, 2, 0.5f, 0.5f, 3, 3}));
  CHECK(merged.slot_names == std::vector<std::string>({"m", "v"}));
  CHECK_EQ(merged.slot_rows[0], 22.0f);    // m of key 1
  CHECK_EQ(merged.slot_rows[1], 20.0f);    // v of key 1
  CHECK(std::isnan(merged.slot_rows[4]));  // v of key 3: not known until an optimizer says it
  CHECK_EQ(merged.slot_rows[6], 32.0f);
  CHECK_EQ(merged.slot_rows[8], 31.0f);
  CHECK_EQ(static_cast<int>(table.Slots().size()), 3);
  table.Import(context, snapshot, /*replace=*/true);
  CHECK_EQ(table.Size(context), 2);

  // Refused before anything changes.
  TableSnapshot bad = snapshot;
  bad.rows.pop_back();
  CHECK_THROWS(table.Import(context, bad, true), std::invalid_argument, "`rows` must hold 6");
  bad = snapshot;
  bad.policy.records = {1, 2};
  CHECK_THROWS(table.Import(context, bad, true), std::invalid_argument, "3 values per key, 9");
  bad = snapshot;
  bad.slot_widths = {1, 2};
  CHECK_THROWS(table.Import(context, bad), std::invalid_argument, "must have width");
  bad.slot_names = {"v", "v"};
  CHECK_THROWS(table.Import(context, bad, true), std::invalid_argument, "different names");
  CHECK_THROWS(table.ConfigureSlots(context, {{"m", 0, 0.0f, true}}), std::invalid_argument,
               "must be positive");
  CHECK_THROWS(table.ConfigureSlots(context, {{"m", 1, 0.0f, true}, {"m", 1, 0.0f, true}}),
               std::invalid_argument, "different names");
  CHECK_EQ(table.Size(context), 2);
}

// In parts, from several threads, while another one waits to write.
void ContentInParts(Table& table, CallContext context) {
  table.Clear(context);
  table.ConfigureSlots(context, {{"m", 1, 0.25f, true}, {"v", 2, 0.0f, true}});
  const std::vector<uint64_t> keys = {7, 5, 9};
  const std::vector<float> values = {70, 71, 50, 51, 90, 91}, later = {1, 2};
  table.Assign(context, keys.data(), 3, values.data());
  std::unique_ptr<TableReader> reader = table.OpenContent(context, /*with_slots=*/true);
  std::atomic<bool> written{false};
  std::thread writer([&] {
    table.Assign(context, keys.data(), 1, later.data());
    written = true;
  });
  CHECK_EQ(reader->num_keys(), 3);
  const int64_t width = reader->about().snapshot.slot_width();
  CHECK_EQ(width, 3);  // of m and v
  std::vector<uint64_t> read(3);
  std::vector<float> rows(6), slot_rows(3 * width, -1.0f);
  std::vector<int64_t> records(9, -7);
  for (const int64_t first : {0, 2}) {
    const int64_t n = first == 0 ? 2 : 1;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::thread([&] {
      reader->ReadKeys(context, n, read.data() + first);
      reader->ReadRows(context, first, read.data() + first, n, rows.data() + 2 * first,
                       slot_rows.data() + width * first,
                       table.keeps_records() ? records.data() + 3 * first : nullptr);
    }).join();
    CHECK(!written);
  }
  CHECK(read == std::vector<uint64_t>({5, 7, 9}));
  CHECK(rows == std::vector<float>({50, 51, 70, 71, 90, 91}));
  CHECK_EQ(slot_rows[0], 0.25f);  // m
  CHECK_EQ(slot_rows[width], 0.25f);
  CHECK_EQ(records[8], table.keeps_records() ? 0 : -7);  // the score of key 9
  reader.reset();
  writer.join();
  CHECK(Find(table, context, {7}, false).rows == later);
}

void Records(Table& table, CallContext context) {
  if (!table.keeps_records()) {
    CHECK_THROWS(table.Statistics(context), std::invalid_argument, "needs a table with");
    CHECK_THROWS(table.PopEvicted(), std::invalid_argument, "needs a table with");
    return;
  }
  table.Clear(context);
  const std::vector<uint64_t> keys = {4, 4, 6};
  table.RecordTrainingLookup(context, keys.data(), 3);
  table.SetStep(9);
  table.RecordTrainingLookup(context, keys.data(), 1);
  CHECK_EQ(table.Statistics(context).seen, 3);
  std::vector<uint8_t> present(3);
  std::vector<int64_t> frequencies(3), last_steps(3);
  table.KeyStatistics(context, keys.data(), 3, present.data(), frequencies.data(),
                      last_steps.data());
  CHECK_EQ(frequencies[0], 2);
  CHECK_EQ(last_steps[0], 10);
  CHECK_EQ(last_steps[2], 1);
  CHECK_EQ(table.Evict(context), 0);
}

const uint64_t kTrained = 5;
const float kOnes[kDim] = {1.0f, 1.0f};

void Apply(CpuTable& table, const OptimizerOptions& options, int64_t step) {
  InlineExecutor threads;
  ApplyGradients(threads, table, options, 0.01f, step, &kTrained, kOnes, 1, false);
}

void Apply(cuda::CudaTable& table, const OptimizerOptions& options, int64_t step) {
  cuda::ApplyGradients(nullptr, {{&table, &kTrained, kOnes, 1}}, options, 0.01f, step, false);
}

OptimizerOptions Rule(OptimizerKind kind, bool variant = false) {
  OptimizerOptions options;
  options.kind = kind;
  if (kind == OptimizerKind::kMomentum) options.momentum = 0.9f;
  (kind == OptimizerKind::kMomentum ? options.momentum_before_rate : options.amsgrad) = variant;
  return options;
}

// Content of `rule` after 2,000 steps: its slot rows are ones.
TableSnapshot ContentOf(const OptimizerOptions& rule) {
  TableSnapshot content;
  content.keys = {kTrained};
  content.rows = {1.0f, 1.0f};
  NameSavedSlots(OptimizerSlots(rule, kDim), &content);
  content.slot_rows.assign(static_cast<size_t>(content.slot_width()), 1.0f);
  content.optimizer_step = 2000;
  return content;
}

// Ten steps of Adam from nothing move a row by 10 * 0.01 if all gradients are 1. The optimizer has
// counted 500 steps before. `is_trained`: by Adam, before the content comes.
template <typename TableOfMemory>
void ContentOfAnotherRule(CallContext context, bool is_trained) {
  const OptimizerOptions adam = Rule(OptimizerKind::kAdam);
  for (const OptimizerOptions& rule :
       {Rule(OptimizerKind::kSgd), Rule(OptimizerKind::kMomentum),
        Rule(OptimizerKind::kMomentum, true), Rule(OptimizerKind::kAdagrad),
        Rule(OptimizerKind::kRowWiseAdagrad), Rule(OptimizerKind::kAdam, true),
        Rule(OptimizerKind::kFtrl), Rule(OptimizerKind::kAdagradDecay),
        Rule(OptimizerKind::kRmsprop), adam, Rule(OptimizerKind::kLazyAdam)}) {
    TableOfMemory table(Options(false));
    for (int64_t step = 1; is_trained && step <= 3; ++step) Apply(table, adam, step);
    const TableSnapshot content = ContentOf(rule);
    table.Import(context, content, /*replace=*/true);
    // Another dump, before the next step, has what was in the first.
    const TableSnapshot back = table.Export(context, true);
    CHECK(back.slot_names == content.slot_names && back.slot_rows == content.slot_rows);
    CHECK_EQ(back.optimizer_step, 2000);

    const bool goes_on = rule.kind == OptimizerKind::kLazyAdam || rule == adam;
    for (int64_t step = 501; step <= 510; ++step) Apply(table, adam, step);
    const TableSnapshot trained = table.Export(context, true);
    CHECK_EQ(trained.optimizer_step, goes_on ? 2010 : 10);
    CHECK(trained.slot_names == std::vector<std::string>({"momentum", "velocity"}));
    // Moments of ones stay ones, and are corrected by 1 - 0.999^t with t from 2001 to 2010.
    const double expected = goes_on ? 0.0930 : 0.1;
    CHECK(std::abs(1.0 - trained.rows[0] - expected) < 2e-4);
  }
  // Of a table that is trained, content of another rule cannot become a part.
  TableOfMemory table(Options(false));
  Apply(table, adam, 1);
  CHECK_THROWS(table.Import(context, ContentOf(Rule(OptimizerKind::kAdagrad))),
               std::invalid_argument, "must be of the table's optimizer");
}

void AllCalls(Table& table, CallContext context) {
  RowsInAndOut(table, context);
  SlotsAndSnapshots(table, context);
  ContentInParts(table, context);
  Records(table, context);
}

void TheWrongContextIsRefused() {
  InlineExecutor threads;
  CpuTable host(Options(false));
  cuda::CudaTable device(Options(false));
  CHECK_THROWS(host.Find(CallContext(nullptr), nullptr, 0, nullptr, nullptr), std::logic_error,
               "stream");
  CHECK_THROWS(device.Find(threads, nullptr, 0, nullptr, nullptr), std::logic_error, "threads");
}

void RowsOnDiskAreForHostMemory() {
  TableOptions options = Options(false);
  options.storage.path = ".";
  options.storage.memory_bytes = 1 << 20;
  CHECK_THROWS(cuda::CudaTable{options}, std::invalid_argument, "tables in host memory");
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::InlineExecutor threads;
  for (const bool with_policy : {false, true}) {
    sok::CpuTable host(sok::Options(with_policy));
    sok::AllCalls(host, threads);
    sok::cuda::CudaTable device(sok::Options(with_policy));
    sok::AllCalls(device, nullptr);
  }
  for (const bool is_trained : {false, true}) {
    sok::ContentOfAnotherRule<sok::CpuTable>(threads, is_trained);
    sok::ContentOfAnotherRule<sok::cuda::CudaTable>(nullptr, is_trained);
  }
  sok::TheWrongContextIsRefused();
  sok::RowsOnDiskAreForHostMemory();
  return 0;
}
