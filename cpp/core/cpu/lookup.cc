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
  const std::string suffix = " (table '" + table + "')";
  const int64_t count = row_splits == nullptr ? num_keys : batch;
  if (limits.multiple > 1 && count % limits.multiple != 0) {
    throw std::invalid_argument(std::string("the number of ") +
                                (row_splits == nullptr ? "keys" : "rows") +
                                " must be a multiple of " + std::to_string(limits.multiple) +
                                ". Received: " + std::to_string(count) + suffix);
  }
  if (row_splits != nullptr && (row_splits[0] != 0 || row_splits[batch] != num_keys)) {
    throw std::invalid_argument(
        "row_splits must lead from 0 to num_keys = " + std::to_string(num_keys) + ". Received: " +
        std::to_string(row_splits[0]) + " to " + std::to_string(row_splits[batch]) + suffix);
  }
  if (row_splits != nullptr) {
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t hotness = row_splits[b + 1] - row_splits[b];
      if (hotness < 0) {
        throw std::invalid_argument(
            "row_splits must not decrease. Received: " + std::to_string(row_splits[b]) +
            " before " + std::to_string(row_splits[b + 1]) + " at sample " + std::to_string(b) +
            suffix);
      }
      if (limits.max_hotness > 0 && hotness > limits.max_hotness) {
        throw std::invalid_argument("a sample may hold at most " +
                                    std::to_string(limits.max_hotness) +
                                    " keys. Received: " + std::to_string(hotness) +
                                    " keys in row " + std::to_string(b) + suffix);
      }
    }
  }
  if (limits.key_limit > 0) {
    const uint64_t limit = static_cast<uint64_t>(limits.key_limit);
    std::atomic<int64_t> first{num_keys};
    ex.ParallelFor(num_keys, 16384, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (keys[i] < limit) continue;
        int64_t seen = first.load();
        while (i < seen && !first.compare_exchange_weak(seen, i)) {
        }
        return;
      }
    });
    if (first < num_keys) {
      throw std::invalid_argument("without a hash table a key is a row index and must lie in [0, " +
                                  std::to_string(limits.key_limit) + "). Received: key " +
                                  std::to_string(static_cast<int64_t>(keys[first])) +
                                  " at position " + std::to_string(first.load()) + suffix);
    }
  }
}

}  // namespace sok
