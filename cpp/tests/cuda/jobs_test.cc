// One launch for many tables, under the emulator: each table gets what it would get alone, from
// plain loops or the CPU's tables; and the number of launches does not grow with that of tables.
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cpp/core/cpu/apply.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

using cuda::CudaTable;
using Keys = std::vector<uint64_t>;
using Rows = std::vector<float>;

constexpr cuda::Stream kStream = nullptr;
constexpr int kTables = 70;  // more than one launch holds of any job

int64_t Length(const Keys& keys) { return static_cast<int64_t>(keys.size()); }

bool SameBits(const Rows& a, const Rows& b) {
  if (a.empty()) return b.empty();
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Sizes around whole warps and blocks, and none at all.
Keys RandomKeys(std::mt19937_64& random, int table) {
  const int64_t lengths[] = {0, 1, 31, 257, 64, 300, 5};
  Keys keys(lengths[table % 7]);
  for (uint64_t& key : keys) key = random() % 90 * (table % 3 + 1);
  return keys;
}

int64_t DimOf(int table) { return table % 4 == 3 ? 3 : 4 * (table % 3 + 1); }

void UniqueOfEachBatch(int64_t world) {
  std::mt19937_64 random(world);
  std::vector<Keys> keys, unique;
  std::vector<std::vector<int32_t>> inverse;
  std::vector<std::vector<int64_t>> offsets;
  for (int t = 0; t < kTables; ++t) {
    keys.push_back(RandomKeys(random, t));
    unique.emplace_back(keys[t].size());
    inverse.emplace_back(keys[t].size(), -1);
    offsets.emplace_back(world + 1, -1);
  }
  std::vector<cuda::UniqueByOwnerBatch> batches;
  for (int t = 0; t < kTables; ++t) {
    batches.push_back(
        {keys[t].data(), Length(keys[t]), unique[t].data(), inverse[t].data(), offsets[t].data()});
  }
  cuda::Workspace workspace;
  cuda::UniqueByOwner(kStream, workspace, batches, world);
  for (int t = 0; t < kTables; ++t) {
    std::vector<Keys> by_owner(world);
    std::map<uint64_t, int> seen;
    for (const uint64_t key : keys[t]) {
      if (seen[key]++ == 0) by_owner[key % world].push_back(key);
    }
    int64_t place = 0;
    for (int64_t owner = 0; owner < world; ++owner) {
      CHECK_EQ(offsets[t][owner], place);
      for (const uint64_t key : by_owner[owner]) CHECK(unique[t][place++] == key);
    }
    CHECK_EQ(offsets[t][world], place);
    for (size_t i = 0; i < keys[t].size(); ++i) {
      CHECK(inverse[t][i] >= 0 && inverse[t][i] < place);
      CHECK(unique[t][inverse[t][i]] == keys[t][i]);
    }
  }
}

// A batch of one table, with all that its samples point to.
struct Batch {
  std::vector<int32_t> inverse;
  std::vector<int64_t> row_splits = {0};
  Rows weights, rows, grad, out, rows_grad;
  Samples samples;
  int64_t num_unique, dim;
};

void CombinesOfEachBatch() {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<Batch>> all;
  std::vector<cuda::CombineBatch> forward;
  std::vector<cuda::CombineGradientBatch> backward;
  for (int t = 0; t < kTables; ++t) {
    auto b = std::make_unique<Batch>();
    b->dim = DimOf(t);
    b->num_unique = t % 5 == 4 ? 0 : 10 + t;
    const int64_t num_keys = b->num_unique == 0 ? 0 : RandomKeys(random, t).size();
    b->samples.combiner = static_cast<Combiner>(t % 4);
    const bool none = b->samples.combiner == Combiner::kNone;
    for (int64_t k = 0; k < num_keys; ++k) {
      b->inverse.push_back(static_cast<int32_t>(random() % b->num_unique));
      b->weights.push_back(normal(random));
    }
    while (b->row_splits.back() < num_keys) {
      b->row_splits.push_back(std::min<int64_t>(num_keys, b->row_splits.back() + random() % 5));
    }
    b->row_splits.push_back(num_keys);
    const int64_t num_samples = none ? num_keys : b->row_splits.size() - 1;
    b->rows.resize(b->num_unique * b->dim);
    b->grad.resize(num_samples * b->dim);
    for (float& x : b->rows) x = normal(random);
    for (float& x : b->grad) x = normal(random);
    b->out.assign(num_samples * b->dim, -1.0f);
    b->rows_grad.assign(b->rows.size(), -1.0f);
    b->samples.inverse = b->inverse.data();
    b->samples.num_keys = num_keys;
    b->samples.row_splits = none ? nullptr : b->row_splits.data();
    b->samples.batch = none ? 0 : num_samples;
    b->samples.weights = t % 2 == 0 ? nullptr : b->weights.data();
    forward.push_back({b->samples, b->rows.data(), b->dim, b->out.data()});
    backward.push_back({b->samples, b->grad.data(), b->num_unique, b->dim, b->rows_grad.data()});
    all.push_back(std::move(b));
  }
  cuda::Workspace workspace;
  cuda::CombineRows(kStream, forward);
  cuda::CombineGradient(kStream, workspace, backward);
  InlineExecutor ex;
  for (const auto& b : all) {
    std::vector<const float*> pointers;
    for (int64_t u = 0; u < b->num_unique; ++u) pointers.push_back(&b->rows[u * b->dim]);
    Rows out(b->out.size()), rows_grad(b->rows_grad.size());
    CombineRows(ex, b->samples, pointers.data(), b->num_unique, b->dim, out.data());
    CHECK(SameBits(b->out, out));
    CombineGradient(ex, b->samples, b->grad.data(), b->num_unique, b->dim, rows_grad.data());
    for (size_t i = 0; i < rows_grad.size(); ++i) {  // over several tiles in another order
      CHECK(std::abs(b->rows_grad[i] - rows_grad[i]) < 1e-4f);
    }
    cuda::CombineGradient(kStream, workspace,
                          {{b->samples, b->grad.data(), b->num_unique, b->dim, rows_grad.data()}});
    CHECK(SameBits(b->rows_grad, rows_grad));
  }
}

TableOptions OptionsOf(int t) {
  TableOptions options;
  options.name = "t" + std::to_string(t);
  options.dim = DimOf(t);
  options.seed = t;
  options.initializer.b = 1.0f;
  return options;
}

// As many device tables, each with a twin on the CPU.
struct Twins {
  std::vector<std::unique_ptr<CpuTable>> cpu;
  std::vector<std::unique_ptr<CudaTable>> device;

  explicit Twins(int num_tables, bool with_policies = false) {
    for (int t = 0; t < num_tables; ++t) {
      TableOptions options = OptionsOf(t);
      if (with_policies && t % 4 == 1) options.policy.filter_freq = 2;
      cpu.push_back(std::make_unique<CpuTable>(options));
      device.push_back(std::make_unique<CudaTable>(options));
    }
  }
};

void StepsOfEachTable(const OptimizerOptions& optimizer, bool unique_keys) {
  Twins twins(kTables, /*with_policies=*/true);
  InlineExecutor ex;
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  for (int step = 1; step <= 4; ++step) {
    std::vector<Keys> keys;
    std::vector<Rows> grads;
    std::vector<TableGradients> on_cpu;
    std::vector<cuda::TableGradients> on_device;
    for (int t = 0; t < kTables; ++t) {
      keys.push_back(RandomKeys(random, t + step));
      if (unique_keys) {
        for (size_t i = 0; i < keys[t].size(); ++i) keys[t][i] = i * 7 + step;
      }
      grads.emplace_back(keys[t].size() * DimOf(t));
      for (float& g : grads[t]) g = normal(random);
      if (t % 4 == 1) {  // rows come in at lookups
        Rows rows(grads[t].size());
        twins.cpu[t]->FindOrInsert(ex, keys[t].data(), Length(keys[t]), rows.data(), nullptr);
        twins.device[t]->FindOrInsert(kStream, keys[t].data(), Length(keys[t]), rows.data(),
                                      nullptr);
      }
      on_cpu.push_back({twins.cpu[t].get(), keys[t].data(), grads[t].data(), Length(keys[t])});
      on_device.push_back(
          {twins.device[t].get(), keys[t].data(), grads[t].data(), Length(keys[t])});
    }
    ApplyGradients(ex, on_cpu, optimizer, 0.05f, step, unique_keys);
    cuda::ApplyGradients(kStream, on_device, optimizer, 0.05f, step, unique_keys);
  }
  for (int t = 0; t < kTables; ++t) {
    Keys keys;
    for (uint64_t key = 0; key < 300; ++key) keys.push_back(key);
    Rows expected(keys.size() * DimOf(t)), rows(expected);
    twins.cpu[t]->Find(ex, keys.data(), Length(keys), expected.data(), nullptr);
    twins.device[t]->Find(kStream, keys.data(), Length(keys), rows.data(), nullptr);
    for (size_t i = 0; i < rows.size(); ++i) CHECK(std::abs(rows[i] - expected[i]) < 1e-5f);
    CHECK_EQ(twins.device[t]->Size(kStream), twins.cpu[t]->size());
  }
}

// The same rows, scattered over a message: the last first, with a gap before each.
void RowsGoToTheirPlaces(std::vector<CudaTable::TableRows> gathers,
                         std::vector<CudaTable::TableFind> finds, const std::vector<Rows>& rows) {
  for (const int64_t gap : {4, 1}) {  // rows at multiples of 4 floats, or not
    for (const bool by_key : {false, true}) {
      std::vector<Rows> messages;
      std::vector<std::vector<int64_t>> offsets;
      for (size_t b = 0; b < rows.size(); ++b) {
        const int64_t n = finds[b].num_keys, dim = finds[b].table->options().dim;
        offsets.emplace_back();
        for (int64_t i = 0; i < n; ++i) offsets[b].push_back((n - 1 - i) * (dim + gap) + gap);
        messages.emplace_back(n * (dim + gap), -9.0f);
        const cuda::RowPlaces places(messages[b].data(), offsets[b].data(), (dim + gap) % 4 == 0);
        finds[b].rows = gathers[b].rows = places;
      }
      by_key ? CudaTable::Find(kStream, finds) : CudaTable::GatherRows(kStream, gathers);
      for (size_t b = 0; b < rows.size(); ++b) {
        const int64_t dim = finds[b].table->options().dim;
        Rows expected(messages[b].size(), -9.0f);
        for (size_t i = 0; i < offsets[b].size(); ++i) {
          std::copy_n(&rows[b][i * dim], dim, &expected[offsets[b][i]]);
        }
        CHECK(SameBits(messages[b], expected));
      }
    }
  }
}

void LookupsOfEachTable() {
  Twins twins(kTables);
  InlineExecutor ex;
  std::mt19937_64 random(9);
  std::vector<Keys> keys;
  std::vector<Rows> rows, found;
  std::vector<std::vector<uint32_t>> numbers;
  const int num_batches = kTables + 3;  // three tables occur twice
  const auto table_of = [](int b) { return b < kTables ? b : 3; };
  for (int b = 0; b < num_batches; ++b) {
    keys.push_back(RandomKeys(random, b < kTables ? b : 5));
    rows.emplace_back(keys[b].size() * DimOf(table_of(b)), -1.0f);
    found.emplace_back(rows[b]);
    numbers.emplace_back(keys[b].size());
  }
  std::vector<CudaTable::TableKeys> inserts;
  std::vector<CudaTable::TableRows> gathers;
  std::vector<CudaTable::TableFind> finds;
  for (int b = 0; b < num_batches; ++b) {
    CudaTable* const table = twins.device[table_of(b)].get();
    inserts.push_back({table, keys[b].data(), Length(keys[b]), numbers[b].data()});
    gathers.push_back({table, numbers[b].data(), Length(keys[b]), rows[b].data()});
    finds.push_back({table, keys[b].data(), Length(keys[b]), found[b].data()});
  }
  CudaTable::FindOrInsertRows(kStream, inserts);
  CudaTable::GatherRows(kStream, gathers);
  CudaTable::Find(kStream, finds);
  for (int b = 0; b < num_batches; ++b) {
    Rows expected(rows[b].size());
    twins.cpu[table_of(b)]->FindOrInsert(ex, keys[b].data(), Length(keys[b]), expected.data(),
                                         nullptr);
    CHECK(SameBits(rows[b], expected));
    CHECK(SameBits(found[b], expected));
  }
  for (int t = 0; t < kTables; ++t) {
    CHECK_EQ(twins.device[t]->Size(kStream), twins.cpu[t]->size());
  }
  RowsGoToTheirPlaces(gathers, finds, rows);
}

void AFullTableKeepsAllFromTakingKeys() {
  std::vector<std::unique_ptr<CudaTable>> tables;
  for (int t = 0; t < 5; ++t) {
    TableOptions options = OptionsOf(t);
    if (t == 3) options.max_capacity = 4;
    tables.push_back(std::make_unique<CudaTable>(options));
  }
  const Keys keys = {1, 2, 3, 4, 5, 1};
  const Rows grads(keys.size() * 12, 1.0f);
  std::vector<uint32_t> numbers(keys.size() * tables.size());
  std::vector<CudaTable::TableKeys> inserts;
  std::vector<cuda::TableGradients> steps;
  for (size_t t = 0; t < tables.size(); ++t) {
    inserts.push_back(
        {tables[t].get(), keys.data(), Length(keys), numbers.data() + t * keys.size()});
    steps.push_back({tables[t].get(), keys.data(), grads.data(), Length(keys)});
  }
  const char* const message = "max_capacity=4. Received: 5 new keys at size 0 (table 't3')";
  CHECK_THROWS(CudaTable::FindOrInsertRows(kStream, inserts), std::length_error, message);
  CHECK_THROWS(cuda::ApplyGradients(kStream, steps, OptimizerOptions(), 0.1f, 1), std::length_error,
               message);
  for (const auto& table : tables) CHECK_EQ(table->Size(kStream), 0);
  steps.push_back(steps[0]);
  CHECK_THROWS(cuda::ApplyGradients(kStream, steps, OptimizerOptions(), 0.1f, 1),
               std::invalid_argument, "table 't0' twice");
}

// Plain tables, one with policies and one without a hashtable, which refuses a key: first or last
// in the list, no other table has changed. Then a step that all of them make, and the CPU's with
// them.
void MixedTables(bool direct_first, const OptimizerOptions& optimizer) {
  std::vector<TableOptions> options;
  for (int t = 0; t < 4; ++t) {
    options.push_back(OptionsOf(t));
    options[t].dim = 4;
  }
  options[1].policy.filter_freq = 2;
  options[direct_first ? 0 : 3].use_hashtable = false;
  options[direct_first ? 0 : 3].max_capacity = 40;
  std::vector<std::unique_ptr<CpuTable>> cpu;
  std::vector<std::unique_ptr<CudaTable>> device;
  for (const TableOptions& of_table : options) {
    cpu.push_back(std::make_unique<CpuTable>(of_table));
    device.push_back(std::make_unique<CudaTable>(of_table));
  }
  InlineExecutor ex;
  const Keys bad = {1, 2, 40, 2}, good = {1, 2, 39, 2}, later = {2, 7};
  const Rows grads(good.size() * 4, 0.5f);
  const auto step = [&](const Keys& keys, int64_t number) {
    std::vector<cuda::TableGradients> batches;
    for (const auto& table : device) {
      batches.push_back({table.get(), keys.data(), grads.data(), Length(keys)});
    }
    cuda::ApplyGradients(kStream, batches, optimizer, 0.1f, number);
  };
  std::vector<int64_t> sizes;
  for (const auto& table : device) sizes.push_back(table->Size(kStream));
  CHECK_THROWS(step(bad, 1), std::out_of_range, direct_first ? "'t0'" : "'t3'");
  for (size_t t = 0; t < device.size(); ++t) CHECK_EQ(device[t]->Size(kStream), sizes[t]);
  const Keys* const steps[] = {&good, &later, &later, &good};
  for (int64_t number = 1; number <= 4; ++number) {
    const Keys& keys = *steps[number - 1];
    std::vector<Rows> rows(4, Rows(keys.size() * 4));
    std::vector<CudaTable::TableFind> lookups;
    std::vector<TableGradients> on_cpu;
    for (int t = 0; t < 4; ++t) {
      lookups.push_back({device[t].get(), keys.data(), Length(keys), rows[t].data()});
      on_cpu.push_back({cpu[t].get(), keys.data(), grads.data(), Length(keys)});
    }
    CudaTable::FindOrInsert(kStream, lookups);
    for (int t = 0; t < 4; ++t) {
      Rows expected(rows[t].size());
      cpu[t]->FindOrInsert(ex, keys.data(), Length(keys), expected.data(), nullptr);
      CHECK(SameBits(rows[t], expected));
    }
    step(keys, number);
    ApplyGradients(ex, on_cpu, optimizer, 0.1f, number);
    CudaTable::Find(kStream, lookups);
    for (int t = 0; t < 4; ++t) {
      Rows expected(rows[t].size());
      cpu[t]->Find(ex, keys.data(), Length(keys), expected.data(), nullptr);
      CHECK(SameBits(rows[t], expected));
    }
  }
}

void ARefusedOptimizerIsAttachedToNone() {
  Twins twins(2);
  const Keys keys = {1};
  const Rows grads(12, 1.0f);
  OptimizerOptions sgd, adagrad;
  adagrad.kind = OptimizerKind::kAdagrad;
  const auto batch_of = [&](int t) {
    return cuda::TableGradients{twins.device[t].get(), keys.data(), grads.data(), 1};
  };
  cuda::ApplyGradients(kStream, {batch_of(1)}, sgd, 0.1f, 1);
  CHECK_THROWS(cuda::ApplyGradients(kStream, {batch_of(0), batch_of(1)}, adagrad, 0.1f, 1),
               std::invalid_argument, "Table 't1' has sgd");
  CHECK(twins.device[0]->Slots().empty());
  cuda::ApplyGradients(kStream, {batch_of(0), batch_of(1)}, sgd, 0.1f, 2);
}

void ScratchRecoversFromALackOfMemory() {
  cuda::Workspace workspace;
  const auto call = [&] {
    const cuda::Workspace::Scope scope(workspace, kStream);
    for (int i = 0; i < 3; ++i) workspace.Take<char>(3 << 20);
  };
  call();  // several blocks, which the next call wants as one
  if (!emulator::kEmulated) return;
  emulator::allocations_left = 0;
  CHECK_THROWS(call(), cuda::DeviceMemoryError, "");
  emulator::allocations_left = INT64_MAX;
  for (int i = 0; i < 3; ++i) call();
  const int64_t allocations = emulator::num_allocations;
  call();
  CHECK_EQ(emulator::num_allocations, allocations);
}

// Launches of one warm step, lookup included.
int64_t LaunchesOfAStep(int num_tables, OptimizerKind kind, bool unique_keys) {
  OptimizerOptions optimizer;
  optimizer.kind = kind;
  std::vector<std::unique_ptr<CudaTable>> tables;
  TableOptions options;
  options.dim = 8;
  for (int t = 0; t < num_tables; ++t) {
    tables.push_back(std::make_unique<CudaTable>(options));
    tables[t]->Reserve(kStream, 10000);  // else the host waits to learn how much is left
  }
  Keys keys(180);  // of 26 tables, as many as CUB sorts in one launch
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = unique_keys ? i : i % 90;
  const Rows grads(keys.size() * 8, 0.5f);
  std::vector<uint32_t> numbers(keys.size() * num_tables);
  std::vector<CudaTable::TableKeys> inserts;
  std::vector<cuda::TableGradients> steps;
  for (int t = 0; t < num_tables; ++t) {
    inserts.push_back(
        {tables[t].get(), keys.data(), Length(keys), numbers.data() + t * keys.size()});
    steps.push_back({tables[t].get(), keys.data(), grads.data(), Length(keys)});
  }
  int64_t launches = 0, allocations = 0, waits = 0, event_calls = 0;
  for (int step = 1; step <= 12; ++step) {
    launches = emulator::num_launches;
    if (step == 6) {
      allocations = emulator::num_allocations;
      waits = emulator::num_host_waits;
    }
    event_calls = emulator::num_event_calls;
    CudaTable::FindOrInsertRows(kStream, inserts);
    cuda::ApplyGradients(kStream, steps, optimizer, 0.1f, step, unique_keys);
    launches = emulator::num_launches - launches;
    // The lookup and the update record one event at most, and ask for one, however many tables.
    CHECK(emulator::num_event_calls - event_calls <= 4);
  }
  CHECK_EQ(emulator::num_allocations, allocations);
  CHECK_EQ(emulator::num_host_waits, waits);
  return launches;
}

void LaunchesAreThoseOfOneTable(OptimizerKind kind, bool unique_keys, int64_t most) {
  // For an older driver, jobs with a table in them fill a launch at 13.
  const int64_t one = LaunchesOfAStep(1, kind, unique_keys);
  const int64_t many = LaunchesOfAStep(26, kind, unique_keys);
  std::printf("launches of a step: %d for 1 table, %d for 26\n", static_cast<int>(one),
              static_cast<int>(many));
  CHECK(one <= most);
  if (!emulator::kEmulated) return;
  CHECK_EQ(many, one);
  emulator::driver_version = 12000;
  CHECK_EQ(LaunchesOfAStep(1, kind, unique_keys), one);
  const int64_t in_few = LaunchesOfAStep(26, kind, unique_keys);
  CHECK(in_few > many && in_few <= one + 4);
  emulator::driver_version = 12010;
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  using sok::OptimizerKind;
  for (int64_t world : {1, 2, 5}) sok::UniqueOfEachBatch(world);
  sok::CombinesOfEachBatch();
  sok::OptimizerOptions optimizer;
  for (OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kAdam,
                             OptimizerKind::kRowWiseAdagrad}) {
    optimizer.kind = kind;
    sok::StepsOfEachTable(optimizer, false);
    sok::StepsOfEachTable(optimizer, true);
  }
  for (const bool direct_first : {false, true}) {
    optimizer.kind = OptimizerKind::kSgd;
    sok::MixedTables(direct_first, optimizer);
    optimizer.kind = OptimizerKind::kAdam;
    sok::MixedTables(direct_first, optimizer);
    sok::OptimizerOptions walked = optimizer;
    walked.beta_2 = 0.1f;
    sok::MixedTables(direct_first, walked);
  }
  sok::ARefusedOptimizerIsAttachedToNone();
  sok::ScratchRecoversFromALackOfMemory();
  for (const int driver : {12000, 12010}) {
    emulator::driver_version = driver;
    sok::LookupsOfEachTable();
  }
  sok::AFullTableKeepsAllFromTakingKeys();
  sok::LaunchesAreThoseOfOneTable(OptimizerKind::kAdagrad, false, 15);
  sok::LaunchesAreThoseOfOneTable(OptimizerKind::kAdagrad, true, 5);
  sok::LaunchesAreThoseOfOneTable(OptimizerKind::kAdam, true, 6);
  return 0;
}
