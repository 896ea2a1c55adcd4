#include "cpp/core/cpu/lookup.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <vector>

#include "cpp/core/cpu/scratch.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 1024;  // keys worth handing to another thread

void CombineInserted(Executor& ex, CpuTable& table, const uint64_t* unique_keys, int64_t num_unique,
                     const Samples& samples, float* out) {
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  std::unique_lock<std::shared_mutex> lock(table.mutex());
  table.FindOrInsertRows(ex, unique_keys, num_unique, numbers.get(), nullptr);
  const RowCatchUp* catch_up = table.catch_up().get();
  const bool pending = catch_up != nullptr && catch_up->pending();
  ex.ParallelFor(num_unique, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = table.Row(numbers[i]);
      if (pending) catch_up->Apply(row);
      rows[i] = row;
    }
  });
  CombineRows(ex, samples, rows.get(), num_unique, table.dim(), out);
}

void CombineFound(Executor& ex, const CpuTable& table, const uint64_t* unique_keys,
                  int64_t num_unique, const Samples& samples, float* out) {
  const int64_t dim = table.dim();
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  std::shared_lock<std::shared_mutex> lock(table.mutex());
  table.FindRows(ex, unique_keys, num_unique, numbers.get());
  const RowCatchUp* catch_up = table.catch_up().get();
  const bool pending = catch_up != nullptr && catch_up->pending();
  std::vector<int64_t> made_up;  // unique keys whose row is not readable in place
  for (int64_t i = 0; i < num_unique; ++i) {
    if (numbers[i] == kNoRow || pending) {
      made_up.push_back(i);
    } else {
      rows[i] = table.Row(numbers[i]);
    }
  }
  const Scratch<float> scratch(static_cast<int64_t>(made_up.size()) * dim);
  ex.ParallelFor(made_up.size(), kGrain / 4, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t i = made_up[k];
      float* row = scratch.get() + k * dim;
      if (numbers[i] == kNoRow) {
        table.MissingRow(unique_keys[i], row);
      } else {
        catch_up->Read(table.Row(numbers[i]), row);
      }
      rows[i] = row;
    }
  });
  CombineRows(ex, samples, rows.get(), num_unique, dim, out);
}

}  // namespace

void LookupCombine(Executor& ex, CpuTable& table, const uint64_t* unique_keys, int64_t num_unique,
                   bool insert, const Samples& samples, float* out) {
  if (insert && table.keeps_records()) {
    table.Observe(ex, unique_keys, num_unique);
    insert = false;  // what is to be inserted has been
  }
  if (insert) {
    CombineInserted(ex, table, unique_keys, num_unique, samples, out);
  } else {
    CombineFound(ex, table, unique_keys, num_unique, samples, out);
  }
}

void CheckBatch(Executor& ex, const std::string& table, const BatchLimits& limits,
                const uint64_t* keys, int64_t num_keys, const int64_t* row_splits, int64_t batch) {
  const bool has_samples = row_splits != nullptr;
  CheckMultiple(table, limits, has_samples, has_samples ? batch : num_keys);
  if (has_samples) {
    CheckEnds(table, row_splits[0], row_splits[batch], num_keys);
    for (int64_t b = 0; b < batch; ++b) {
      if (SampleIsLegal(limits, row_splits[b], row_splits[b + 1])) continue;
      RefuseSample(table, limits, b, row_splits[b], row_splits[b + 1]);
    }
  }
  if (limits.key_limit <= 0) return;
  std::atomic<int64_t> first{num_keys};
  ex.ParallelFor(num_keys, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (KeyIsLegal(limits, keys[i])) continue;
      int64_t seen = first.load();
      while (i < seen && !first.compare_exchange_weak(seen, i)) {
      }
      return;
    }
  });
  if (first < num_keys) RefuseKey(table, limits, keys[first], first);
}

}  // namespace sok
