#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/policies/records.h"
#include "cpp/core/cuda/table/table.h"

namespace sok {
namespace cuda {
namespace {

TableOptions WaitingOptions(const TableOptions& options) {
  TableOptions waiting;
  waiting.name = options.name + ", waiting keys";
  waiting.dim = kWaitingFloats;
  waiting.key_type = KeyType::kUint64;
  waiting.initializer.kind = InitializerKind::kConstant;
  waiting.initializer.a = 0.0f;  // a row of zeros: never seen
  return waiting;
}

// Calls f(Counter{}) with the type of the filter's counters.
template <typename F>
void WithCounter(int64_t bits, F&& f) {
  switch (bits) {
    case 8:
      return f(uint8_t{0});
    case 16:
      return f(uint16_t{0});
    case 32:
      return f(uint32_t{0});
    default:
      return f(uint64_t{0});
  }
}

}  // namespace

LowestHint::LowestHint(Stream stream) : end(2 * sizeof(uint64_t), stream) { end.Zero(); }

void LowestHint::Forget() {
  end.Zero();
  slack_bits = 64;
}

DeviceRecords::DeviceRecords(const TableOptions& table, Stream stream)
    : options(table.policy), hint(stream) {
  dropped_gradients = Buffer(sizeof(unsigned long long), stream);
  dropped_gradients.Zero();
  if (is_bloom()) {
    bloom = ShapeOfBloomFilter(options);
    // A multiple of 4 bytes: small counters are changed within the word that holds them.
    counters =
        Buffer(static_cast<size_t>(bloom.num_counters() * options.bloom_counter_bits / 8), stream);
    counters.Zero();
  } else if (options.filters()) {
    waiting = std::make_unique<CudaTable>(WaitingOptions(table), 0.875, stream);
  }
}

DeviceRecords::~DeviceRecords() = default;

void DeviceRecords::MoveTo(Stream stream) {
  for (Buffer* moved : {&records, &counters, &dropped_gradients, &hint.end}) moved->MoveTo(stream);
}

int64_t DeviceRecords::bytes(Stream stream) const {
  return static_cast<int64_t>(records.bytes() + counters.bytes() + dropped_gradients.bytes()) +
         (waiting == nullptr ? 0 : waiting->Stats(stream).bytes);
}

void DeviceRecords::Reserve(Stream stream, int64_t num_rows) {
  const size_t bytes = static_cast<size_t>(num_rows) * sizeof(DeviceRecord);
  if (bytes <= records.bytes()) return;
  Buffer larger(bytes, stream);
  const size_t kept = records.bytes();
  if (kept > 0) CopyOnDevice(stream, larger.data(), records.data(), kept);
  // All bits set: last_step is -1, so there is no key.
  CudaCheck(cudaMemsetAsync(larger.as<char>() + kept, 0xFF, bytes - kept, stream),
            "cudaMemsetAsync");
  records = std::move(larger);
}

void DeviceRecords::Clear(Stream stream) {
  step = 0;
  statistics = PolicyCounts();
  records = Buffer();
  counters.Zero();
  dropped_gradients.Zero();
  hint.Forget();
  if (waiting != nullptr) waiting->Clear(stream);
  buffer.Clear();
}

FilterRef DeviceRecords::Filter() const {
  FilterRef ref;
  ref.filter_freq = options.filter_freq;
  ref.is_exact = waiting != nullptr;
  ref.is_bloom = is_bloom();
  if (ref.is_exact) ref.waiting = waiting->Ref();
  ref.bloom = bloom;
  ref.counter_bits = static_cast<int>(options.bloom_counter_bits);
  ref.counters = counters.data();
  return ref;
}

std::vector<int64_t> DeviceRecords::ExportCounters(Stream stream) const {
  std::vector<int64_t> exported;
  if (!is_bloom()) return exported;
  WithCounter(options.bloom_counter_bits, [&](auto zero) {
    std::vector<decltype(zero)> host(static_cast<size_t>(bloom.num_counters()));
    CopyToHost(stream, host.data(), counters.data(), counters.bytes());
    exported.reserve(host.size());
    constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
    for (auto counter : host) {
      exported.push_back(static_cast<int64_t>(std::min<uint64_t>(counter, kMost)));
    }
  });
  return exported;
}

void DeviceRecords::ImportCounters(Stream stream, const std::vector<int64_t>& imported) {
  WithCounter(options.bloom_counter_bits, [&](auto zero) {
    using Counter = decltype(zero);
    const int64_t most = static_cast<int64_t>(std::min<uint64_t>(
        std::numeric_limits<Counter>::max(), std::numeric_limits<int64_t>::max()));
    std::vector<Counter> host;
    host.reserve(imported.size());
    for (int64_t count : imported) {
      host.push_back(static_cast<Counter>(std::clamp<int64_t>(count, 0, most)));
    }
    CopyToDevice(stream, counters.data(), host.data(), counters.bytes());
    Synchronize(stream);
  });
}

std::vector<WaitingKey> DeviceRecords::ExportWaiting(Stream stream) const {
  if (waiting == nullptr) return {};
  const TableSnapshot all = waiting->Export(stream, /*with_slots=*/false);
  std::vector<WaitingKey> exported;
  exported.reserve(all.keys.size());
  for (size_t i = 0; i < all.keys.size(); ++i) {
    WaitingRow row;
    std::memcpy(&row, all.rows.data() + i * kWaitingFloats, sizeof(row));
    exported.push_back({all.keys[i], row.count, row.next_step - 1});
  }
  return exported;
}

void DeviceRecords::ImportWaiting(Stream stream, const std::vector<WaitingKey>& imported) {
  if (imported.empty() || !options.filters()) return;
  if (is_bloom()) {
    // On the host: this is rare, and little work compared with the rest of an import.
    std::vector<int64_t> counts = ExportCounters(stream);
    for (const WaitingKey& key : imported) {
      const BloomPlaces places(bloom, HashKey(key.key));
      for (int i = 0; i < bloom.num_hashes; ++i) {
        counts[places[i]] = std::max(counts[places[i]], key.count);
      }
    }
    return ImportCounters(stream, counts);
  }
  std::vector<uint64_t> keys;
  std::vector<float> rows(imported.size() * kWaitingFloats);
  for (size_t i = 0; i < imported.size(); ++i) {
    keys.push_back(imported[i].key);
    const WaitingRow row{imported[i].count, imported[i].last_step + 1};
    std::memcpy(rows.data() + i * kWaitingFloats, &row, sizeof(row));
  }
  Buffer device_keys(keys.size() * sizeof(uint64_t), stream);
  Buffer device_rows(rows.size() * sizeof(float), stream);
  CopyToDevice(stream, device_keys.data(), keys.data(), device_keys.bytes());
  CopyToDevice(stream, device_rows.data(), rows.data(), device_rows.bytes());
  waiting->Assign(stream, device_keys.as<uint64_t>(), static_cast<int64_t>(keys.size()),
                  device_rows.as<float>());
}

}  // namespace cuda
}  // namespace sok
