// CudaTable under the emulator against std::map, and bit by bit against the CPU's table.
#include "cpp/core/cuda/table/table.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

using Keys = std::vector<uint64_t>;
using Rows = std::vector<float>;
constexpr cuda::Stream kStream = nullptr;

TableOptions Options(int64_t dim, InitializerKind kind = InitializerKind::kUniform) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.seed = 5;
  options.initializer.kind = kind;
  if (kind == InitializerKind::kDefaultRows) {
    for (int i = 0; i < 3 * dim; ++i) options.initializer.default_rows.push_back(0.5f * i);
  }
  return options;
}

Rows Find(cuda::CudaTable& table, const Keys& keys, std::vector<uint8_t>* found = nullptr) {
  Rows rows(keys.size() * table.dim(), -77.0f);
  std::vector<uint8_t> flags(keys.size(), 9);
  table.Find(kStream, keys.data(), keys.size(), rows.data(), flags.data());
  cuda::Synchronize(kStream);
  if (found != nullptr) *found = flags;
  return rows;
}

Rows FindOrInsert(cuda::CudaTable& table, const Keys& keys,
                  std::vector<uint8_t>* inserted = nullptr) {
  Rows rows(keys.size() * table.dim(), -77.0f);
  std::vector<uint8_t> flags(keys.size(), 9);
  table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), flags.data());
  cuda::Synchronize(kStream);
  if (inserted != nullptr) *inserted = flags;
  return rows;
}

Rows CpuInitial(const TableOptions& options, const Keys& keys) {
  const CpuTable table(options);
  Rows rows(keys.size() * options.dim);
  for (size_t i = 0; i < keys.size(); ++i) table.InitialRow(keys[i], &rows[i * options.dim]);
  return rows;
}

Keys ExtremeKeys() {
  return {0,
          1,
          2,
          ~uint64_t{0},
          ~uint64_t{0} - 1,
          uint64_t{1} << 63,
          (uint64_t{1} << 63) - 1,
          uint64_t{1} << 32,
          0xFFFFFFFFull,
          0xFFFFFFFFFFFFFF00ull};
}

void InitialRowsAreThoseOfTheCpu(InitializerKind kind, int64_t dim) {
  const TableOptions options = Options(dim, kind);
  Keys keys = ExtremeKeys();
  for (uint64_t k = 100; k < 170; ++k) keys.push_back(k * 977);
  const Rows expected = CpuInitial(options, keys);
  cuda::CudaTable table(options);
  std::vector<uint8_t> flags;
  CHECK(Find(table, keys, &flags) == expected);  // missing: read, not inserted
  CHECK_EQ(std::count(flags.begin(), flags.end(), 0), static_cast<int64_t>(keys.size()));
  CHECK_EQ(table.Size(kStream), 0);
  CHECK(FindOrInsert(table, keys, &flags) == expected);
  CHECK_EQ(std::count(flags.begin(), flags.end(), 1), static_cast<int64_t>(keys.size()));
  CHECK(Find(table, keys, &flags) == expected);
  CHECK_EQ(std::count(flags.begin(), flags.end(), 1), static_cast<int64_t>(keys.size()));
}

// Random calls on few keys, many of them twice in a batch.
void AgreesWithAMap(int64_t dim, bool with_slots) {
  TableOptions options = Options(dim, InitializerKind::kConstant);
  options.initializer.a = 0.25f;
  cuda::CudaTable table(options);
  if (with_slots) table.ConfigureSlots(kStream, {{"m", 3, 1.5f, true}});
  std::map<uint64_t, float> expected;  // of every column
  std::mt19937_64 random(dim);
  Keys universe = ExtremeKeys();
  for (uint64_t k = 100; k < 400; ++k) universe.push_back(k);
  float counter = 1.0f;
  for (int call = 0; call < 60; ++call) {
    Keys keys(random() % 120);
    for (uint64_t& key : keys) key = universe[random() % universe.size()];
    std::vector<uint8_t> flags;
    const auto check = [&](const Rows& rows) {
      for (size_t i = 0; i < keys.size(); ++i) {
        const auto at = expected.find(keys[i]);
        for (int64_t d = 0; d < dim; ++d) {
          CHECK_EQ(rows[i * dim + d], at == expected.end() ? 0.25f : at->second);
        }
      }
    };
    switch (random() % 5) {
      case 0:
        check(Find(table, keys, &flags));
        for (size_t i = 0; i < keys.size(); ++i) CHECK_EQ(flags[i], expected.count(keys[i]));
        break;
      case 1:
      case 2: {
        check(FindOrInsert(table, keys, &flags));
        std::map<uint64_t, int> times;
        for (size_t i = 0; i < keys.size(); ++i) times[keys[i]] += flags[i];
        for (const auto& [key, n] : times) CHECK_EQ(n, 1 - static_cast<int>(expected.count(key)));
        for (uint64_t key : keys) expected.emplace(key, 0.25f);
        break;
      }
      case 3: {
        Rows rows(keys.size() * dim);
        for (size_t i = 0; i < keys.size(); ++i) {
          expected[keys[i]] = ++counter;
          std::fill_n(&rows[i * dim], dim, counter);
        }
        table.Assign(kStream, keys.data(), keys.size(), rows.data());
        break;
      }
      case 4: {
        if (random() % 2 == 0) keys.resize(keys.size() / 4);
        int64_t present = 0;
        Keys distinct = keys;
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
        for (uint64_t key : distinct) present += expected.erase(key);
        CHECK_EQ(table.Erase(kStream, keys.data(), keys.size()), present);
        break;
      }
    }
    CHECK_EQ(table.Size(kStream), static_cast<int64_t>(expected.size()));
  }
  const TableSnapshot exported = table.Export(kStream, true);
  CHECK_EQ(exported.keys.size(), expected.size());
  CHECK_EQ(exported.slot_rows.size(), with_slots ? 3 * expected.size() : 0);
  size_t i = 0;
  for (const auto& [key, value] : expected) {
    CHECK_EQ(exported.keys[i], key);
    CHECK_EQ(exported.rows[i * dim + dim - 1], value);
    if (with_slots) CHECK_EQ(exported.slot_rows[i * 3 + 2], 1.5f);
    ++i;
  }
  cuda::CudaTable other(options);
  if (with_slots) other.ConfigureSlots(kStream, {{"m", 3, 0.0f, true}});
  other.Import(kStream, exported);
  const TableSnapshot again = other.Export(kStream, true);
  CHECK(again.keys == exported.keys && again.rows == exported.rows);
  CHECK(again.slot_rows == exported.slot_rows);
  table.Clear(kStream);
  CHECK_EQ(table.Size(kStream), 0);
  CHECK(FindOrInsert(table, {1, 2, 3}) == Rows(3 * dim, 0.25f));
}

void GrowthKeepsEveryRow(double max_load_factor) {
  const TableOptions options = Options(2);
  cuda::CudaTable table(options, max_load_factor);
  Keys keys;
  std::mt19937_64 random(7);
  for (int i = 0; i < 6000; ++i) keys.push_back(random());
  for (size_t begin = 0; begin < keys.size(); begin += 500) {
    const Keys batch(keys.begin() + begin, keys.begin() + begin + 500);
    Rows rows(batch.size() * 2);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(begin * 2 + i);
    table.Assign(kStream, batch.data(), batch.size(), rows.data());
  }
  const Rows rows = Find(table, keys);
  for (size_t i = 0; i < rows.size(); ++i) CHECK_EQ(rows[i], static_cast<float>(i));
  const MemoryStats stats = table.Stats(kStream);
  CHECK_EQ(stats.size, 6000);
  CHECK(stats.load_factor <= max_load_factor && stats.load_factor > max_load_factor * 0.4);
  CHECK(stats.mean_probe_length >= 1.0 && stats.mean_probe_length <= stats.max_probe_length);
}

void MaxCapacityIsAllOrNothing() {
  TableOptions options = Options(2);
  options.max_capacity = 100;
  cuda::CudaTable table(options);
  Keys keys;
  for (uint64_t k = 0; k < 95; ++k) keys.push_back(k);
  FindOrInsert(table, keys);
  keys = {93, 94, 95, 95, 96, 97, 98, 99, 100};
  CHECK_THROWS(FindOrInsert(table, keys), std::length_error,
               "max_capacity=100. Received: 6 new keys at size 95 (table 't')");
  CHECK_EQ(table.Size(kStream), 95);
  keys.pop_back();
  FindOrInsert(table, keys);
  CHECK_EQ(table.Size(kStream), 100);
  FindOrInsert(table, keys);  // all present
  const Keys erased = {3, 3, 4, 1000};
  CHECK_EQ(table.Erase(kStream, erased.data(), erased.size()), 2);
  FindOrInsert(table, {500, 501});
  CHECK_EQ(table.Size(kStream), 100);
  CHECK(table.Stats(kStream).arena_bytes < 5 << 20);  // one chunk
}

// Near their capacity tables look for misses, together, and wait once for what they find.
void FullTablesWaitOnceForAll() {
  TableOptions options = Options(2);
  options.max_capacity = 100;
  std::vector<std::unique_ptr<cuda::CudaTable>> tables;
  std::vector<cuda::CudaTable::TableKeys> batches;
  Keys keys;
  for (uint64_t k = 0; k < 100; ++k) keys.push_back(k);
  std::vector<uint32_t> row_numbers(5 * keys.size());
  for (size_t t = 0; t < 5; ++t) {
    tables.push_back(std::make_unique<cuda::CudaTable>(options));
    batches.push_back({tables[t].get(), keys.data(), 100, row_numbers.data() + 100 * t});
  }
  for (int i = 0; i < 3; ++i) cuda::CudaTable::FindOrInsertRows(kStream, batches);
  const int64_t waits = emulator::num_host_waits;
  for (int i = 0; i < 10; ++i) cuda::CudaTable::FindOrInsertRows(kStream, batches);
  CHECK_EQ(emulator::num_host_waits, waits + 10);
  const Rows expected = FindOrInsert(*tables[4], keys);
  CHECK_EQ(emulator::num_host_waits, waits + 12);  // once more in FindOrInsert of this file
  Rows rows(expected.size());
  tables[4]->GatherRows(kStream, row_numbers.data() + 400, 100, rows.data());
  CHECK(rows == expected);
  Keys more = keys;
  more[7] = 1000;
  batches[3].keys = more.data();
  CHECK_THROWS(cuda::CudaTable::FindOrInsertRows(kStream, batches), std::length_error,
               "Received: 1 new keys at size 100");
  CHECK_EQ(tables[3]->Size(kStream), 100);
}

void AWarmStepNeitherAllocatesNorWaits() {
  cuda::CudaTable table(Options(4));
  Keys keys;
  for (uint64_t k = 0; k < 300; ++k) keys.push_back(k * 31);
  Rows rows(keys.size() * 4);
  for (int i = 0; i < 20; ++i) {
    table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
  }
  table.Reserve(kStream, 10000);
  table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
  const int64_t allocations = emulator::num_allocations, waits = emulator::num_host_waits;
  for (int i = 0; i < 20; ++i) {
    table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
    table.Find(kStream, keys.data(), keys.size(), rows.data(), nullptr);
  }
  CHECK_EQ(emulator::num_allocations, allocations);
  CHECK_EQ(emulator::num_host_waits, waits);
}

void AnExportLeavesNoScratch() {
  cuda::CudaTable table(Options(4));
  Keys keys(200'000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<uint32_t> numbers(keys.size());
  table.FindOrInsertRows(kStream, keys.data(), keys.size(), numbers.data(), nullptr);
  const int64_t before = emulator::bytes_allocated;
  CHECK(table.Export(kStream, true).keys == keys);
  CHECK_EQ(emulator::bytes_allocated, before);
}

void StaysOnItsDevice() {
  const int64_t before = emulator::bytes_allocated;
  {
    cuda::CudaTable table(Options(8));
    FindOrInsert(table, {1, 2, 3});
    cudaSetDevice(1);
    CHECK_THROWS(FindOrInsert(table, {4}), cuda::CudaError, "must be the table's: 0. Received: 1");
    cuda::CudaTable other(Options(8));  // on device 1
    FindOrInsert(other, {1});
    cudaSetDevice(0);
    CHECK_THROWS(FindOrInsert(other, {4}), cuda::CudaError, "1. Received: 0");
    FindOrInsert(table, {4});
    CHECK_EQ(table.Size(kStream), 4);
    cuda::Workspace workspace;
    for (int device = 0; device < 2; ++device) {
      cudaSetDevice(device);
      const cuda::Workspace::Scope scope(workspace, kStream);
      workspace.Take<char>(100);
    }
    cudaSetDevice(0);
  }  // the emulator checks that each piece is freed on its own device
  CHECK_EQ(emulator::current_device, 0);
  CHECK_EQ(emulator::bytes_allocated, before);
}

// On device 1 of two: the end of a table, of its memory and of its readers makes no context on device
// 0, whatever thread it comes from. The emulator ends the process where one does.
void OtherDevicesAreNotTouched() {
  std::thread([] {
    cudaSetDevice(1);
    emulator::forbidden_device = 0;
    auto table = std::make_unique<cuda::CudaTable>(Options(8));
    FindOrInsert(*table, {1, 2, 3});
    auto workspace = std::make_unique<cuda::Workspace>();
    {
      const cuda::Workspace::Scope scope(*workspace, kStream);
      workspace->Take<char>(100);
    }
    auto memory = std::make_unique<cuda::HostBuffer>(100);
    auto event = std::make_unique<cuda::TimedEvent>();
    std::thread([&] {
      {
        const cuda::DeviceScope scope(1);
        CHECK_EQ(table->Size(kStream), 3);
        CHECK(table->Export(kStream, true).keys.size() == 3);
      }
      table.reset();
      workspace.reset();
      memory.reset();
      event.reset();
      CHECK(!emulator::has_context);
    }).join();
    cuda::ReleaseMemory();  // the first thread's context is still current there
  }).join();
  emulator::forbidden_device = -1;
}

// Rank 1 of 3 has the keys 1, 4, 7, ...; the CPU's table gets the same calls.
void WithoutAHashtable() {
  InlineExecutor ex;
  TableOptions options = Options(5);
  options.use_hashtable = false;
  options.max_capacity = 1000;
  options.rank = 1;
  options.world_size = 3;
  options.initial_capacity = 1000;
  CpuTable cpu(options);
  cuda::CudaTable table(options);
  Keys all(1000);
  for (size_t i = 0; i < all.size(); ++i) all[i] = 3 * i + 1;
  std::vector<uint8_t> flags;
  CHECK_EQ(table.Size(kStream), 1000);
  CHECK(Find(table, all, &flags) == CpuInitial(options, all));
  CHECK(flags == std::vector<uint8_t>(1000, 1));
  const Keys some = {2998, 1, 1, 7};
  FindOrInsert(table, some, &flags);
  CHECK(flags == std::vector<uint8_t>(4, 0));
  std::vector<uint32_t> rows(4);
  table.FindRows(kStream, some.data(), 4, rows.data());
  CHECK(rows == std::vector<uint32_t>({999, 0, 0, 2}));
  const std::vector<uint32_t> actual = {2};  // what lies behind these is not looked at
  const Keys partly = {4, 1, 0, 2};
  table.FindOrInsertRows(kStream, partly.data(), 4, rows.data(), nullptr, actual.data());
  CHECK_EQ(rows[0], 1u);
  CHECK_EQ(rows[1], 0u);

  Rows given(some.size() * 5);
  for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<float>(i);
  cpu.Assign(ex, some.data(), 4, given.data());
  table.Assign(kStream, some.data(), 4, given.data());
  Rows expected(all.size() * 5);
  cpu.Find(ex, all.data(), all.size(), expected.data(), nullptr);
  CHECK(Find(table, all) == expected);
  const TableSnapshot exported = table.Export(kStream, true);
  CHECK(exported.keys == all);
  CHECK(exported.rows == expected);

  // A bad key leaves the table as it was.
  for (uint64_t bad : {uint64_t{0}, uint64_t{2}, uint64_t{3001}, ~uint64_t{0}}) {
    const Keys batch = {7, bad, 0};
    const std::string what = bad == ~uint64_t{0} ? "-1" : std::to_string(bad);
    const std::string words = "in [0, 3000) with key % 3 == 1. Received: key " + what + " (table";
    CHECK_THROWS(table.Assign(kStream, batch.data(), 3, given.data()), std::out_of_range,
                 words.c_str());
    CHECK_THROWS(Find(table, batch), std::out_of_range, words.c_str());
    CHECK_THROWS(FindOrInsert(table, batch), std::out_of_range, words.c_str());
    TableSnapshot snapshot;
    snapshot.keys = batch;
    snapshot.rows.assign(given.begin(), given.begin() + 15);
    CHECK_THROWS(table.Import(kStream, snapshot), std::out_of_range, words.c_str());
  }
  CHECK_THROWS(table.Erase(kStream, all.data(), 1), std::invalid_argument, "use_hashtable=false");
  CHECK_THROWS(table.Reserve(kStream, 1001), std::length_error, "max_capacity=1000");
  CHECK(Find(table, all) == expected);

  const MemoryStats stats = table.Stats(kStream);
  CHECK_EQ(stats.size, 1000);
  CHECK_EQ(stats.capacity, 1000);
  CHECK_EQ(stats.num_buckets, 0);
  CHECK_EQ(stats.index_bytes, 0);
  table.Clear(kStream);
  CHECK_EQ(table.Size(kStream), 1000);
  CHECK(Find(table, all) == CpuInitial(options, all));
  table.Import(kStream, exported);
  CHECK(Find(table, all) == expected);
}

// Lookups wait once, to know whether all keys are good; nothing is allocated.
void AWarmLookupWithoutAHashtableWaitsOnce() {
  TableOptions options = Options(8);
  options.use_hashtable = false;
  options.max_capacity = 5000;
  cuda::CudaTable table(options);
  Keys keys(4000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i % 700;
  Rows rows(keys.size() * 8);
  std::vector<uint8_t> found(keys.size());
  table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
  const int64_t allocations = emulator::num_allocations, waits = emulator::num_host_waits;
  table.FindOrInsert(kStream, keys.data(), keys.size(), rows.data(), nullptr);
  CHECK_EQ(emulator::num_host_waits, waits + 1);
  table.Find(kStream, keys.data(), keys.size(), rows.data(), found.data());
  CHECK_EQ(emulator::num_host_waits, waits + 2);
  CHECK_EQ(emulator::num_allocations, allocations);
}

void RefusesWhatItCannotDo() {
  CHECK_THROWS(cuda::CudaTable table(Options((1 << 20) + 1)), std::invalid_argument,
               "at most 2^20");
  CHECK_THROWS(cuda::CudaTable table(Options(4), 1.5), std::invalid_argument, "max_load_factor");
  CHECK_THROWS(cuda::Buffer(size_t{1} << 60, kStream), cuda::DeviceMemoryError, "ran out");
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  using sok::InitializerKind;
  for (InitializerKind kind :
       {InitializerKind::kConstant, InitializerKind::kUniform, InitializerKind::kNormal,
        InitializerKind::kTruncatedNormal, InitializerKind::kDefaultRows}) {
    for (int64_t dim : {1, 6, 8, 20}) sok::InitialRowsAreThoseOfTheCpu(kind, dim);
  }
  sok::AgreesWithAMap(1, false);
  sok::AgreesWithAMap(8, true);
  sok::AgreesWithAMap(5, true);
  sok::GrowthKeepsEveryRow(0.5);
  sok::GrowthKeepsEveryRow(0.95);
  sok::MaxCapacityIsAllOrNothing();
  sok::FullTablesWaitOnceForAll();
  sok::AWarmStepNeitherAllocatesNorWaits();
  sok::AnExportLeavesNoScratch();
  if (emulator::kEmulated) {  // two devices
    sok::StaysOnItsDevice();
    sok::OtherDevicesAreNotTouched();
  }
  sok::WithoutAHashtable();
  sok::AWarmLookupWithoutAHashtableWaitsOnce();
  sok::RefusesWhatItCannotDo();
  CHECK_EQ(emulator::bytes_allocated, 0);
}
