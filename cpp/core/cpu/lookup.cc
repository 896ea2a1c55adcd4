#include "cpp/core/cpu/lookup.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/route.h"
#include "cpp/core/cpu/scratch.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 1024;  // keys worth handing to another thread

// Needs the exclusive lock.
void CombineInserted(Executor& ex, CpuTable& table, const FeatureLookup& feature) {
  const int64_t num_unique = feature.num_unique;
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  table.FindOrInsertRows(ex, feature.unique_keys, num_unique, numbers.get(), nullptr);
  table.RememberRows(feature.unique_keys, num_unique, numbers.get());
  const RowCatchUp* catch_up = table.catch_up().get();
  const bool pending = catch_up != nullptr && catch_up->pending();
  ex.ParallelFor(num_unique, kGrain, [&](int64_t begin, int64_t end) {
    table.Rows(numbers.get() + begin, end - begin, rows.get() + begin);
    for (int64_t i = begin; pending && i < end; ++i) catch_up->Apply(table.Row(numbers[i]));
  });
  CombineRows(ex, feature.samples, rows.get(), num_unique, table.dim(), feature.out);
}

// Needs a lock.
void CombineFound(Executor& ex, const CpuTable& table, const FeatureLookup& feature) {
  const int64_t num_unique = feature.num_unique, dim = table.dim();
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  table.FindRows(ex, feature.unique_keys, num_unique, numbers.get());
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
        table.MissingRow(feature.unique_keys[i], row);
      } else {
        catch_up->Read(table.Row(numbers[i]), row);
      }
      rows[i] = row;
    }
  });
  CombineRows(ex, feature.samples, rows.get(), num_unique, dim, feature.out);
}

void CheckSplits(const std::string& table, const BatchLimits& limits, const int64_t* row_splits,
                 int64_t batch, int64_t num_keys) {
  CheckEnds(table, row_splits[0], row_splits[batch], num_keys);
  // Mostly all is well, and a loop without branches says so.
  const int64_t most_keys = limits.max_hotness > 0 ? limits.max_hotness : num_keys;
  bool is_wrong = false;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t hotness = row_splits[b + 1] - row_splits[b];
    is_wrong |= (hotness < 0) | (hotness > most_keys);
  }
  for (int64_t b = 0; is_wrong && b < batch; ++b) {
    if (SampleIsLegal(limits, row_splits[b], row_splits[b + 1])) continue;
    RefuseSample(table, limits, b, row_splits[b], row_splits[b + 1]);
  }
}

// A training lookup of a table with policies. Needs the exclusive lock.
void RecordLookup(Executor& ex, CpuTable& table, const std::vector<uint64_t>& keys) {
  const Scratch<uint32_t> row_numbers(keys.size());
  table.RecordTrainingRows(ex, keys.data(), keys.size(), row_numbers.get());
}

// All features of one table, whose lock is held: the exclusive one to insert.
void LookupTable(Executor& ex, std::vector<FeatureLookup>& features, const int64_t* members,
                 int64_t num_members, bool insert) {
  CpuTable& table = *features[members[0]].table;
  for (int64_t m = 0; m < num_members; ++m) {
    FeatureLookup& feature = features[members[m]];
    feature.num_unique = UniqueKeys(ex, feature.keys, feature.samples.num_keys, feature.unique_keys,
                                    feature.inverse);
    feature.samples.inverse = feature.inverse;
  }
  if (insert && table.keeps_records()) {
    std::vector<uint64_t> keys;
    for (int64_t m = 0; m < num_members; ++m) {
      const FeatureLookup& feature = features[members[m]];
      keys.insert(keys.end(), feature.unique_keys, feature.unique_keys + feature.num_unique);
    }
    RecordLookup(ex, table, keys);
    insert = false;  // what is to be inserted has been
  }
  for (int64_t m = 0; m < num_members; ++m) {
    const FeatureLookup& feature = features[members[m]];
    if (insert) {
      CombineInserted(ex, table, feature);
    } else {
      CombineFound(ex, table, feature);
    }
  }
}

}  // namespace

void LookupGroup(Executor& ex, std::vector<FeatureLookup>* features, bool insert) {
  std::vector<CpuTable*> tables;
  std::vector<int64_t> num_keys;
  tables.reserve(features->size());
  num_keys.reserve(features->size());
  for (const FeatureLookup& feature : *features) {
    tables.push_back(feature.table);
    num_keys.push_back(feature.samples.num_keys);
  }
  const TableGroup group(tables);
  const TableGroup::Lock lock(group, /*exclusive=*/insert);
  group.ForEach(ex, num_keys, [&](Executor& inner, const int64_t* members, int64_t num_members) {
    LookupTable(inner, *features, members, num_members, insert);
  });
}

void ReadGroup(Executor& ex, const std::vector<RowRequest>& requests, bool insert) {
  std::vector<CpuTable*> tables;
  std::vector<int64_t> num_keys;
  tables.reserve(requests.size());
  num_keys.reserve(requests.size());
  for (const RowRequest& request : requests) {
    tables.push_back(request.table);
    num_keys.push_back(request.num_keys);
  }
  const TableGroup group(tables);
  const TableGroup::Lock lock(group, /*exclusive=*/insert);
  group.ForEach(ex, num_keys, [&](Executor& inner, const int64_t* members, int64_t num_members) {
    CpuTable& table = *requests[members[0]].table;
    bool insert_missing = insert;
    if (insert && table.keeps_records()) {
      std::vector<uint64_t> keys;
      for (int64_t m = 0; m < num_members; ++m) {
        const RowRequest& request = requests[members[m]];
        keys.insert(keys.end(), request.keys, request.keys + request.num_keys);
      }
      RecordLookup(inner, table, keys);
      insert_missing = false;
    }
    for (int64_t m = 0; m < num_members; ++m) {
      const RowRequest& request = requests[members[m]];
      if (insert_missing) {
        table.ReadOrInsert(inner, request.keys, request.num_keys, request.rows);
      } else {
        table.Read(inner, request.keys, request.num_keys, request.rows, nullptr);
      }
    }
  });
}

void CheckBatch(Executor& ex, const std::string& table, const BatchLimits& limits,
                const uint64_t* keys, int64_t num_keys, const int64_t* row_splits, int64_t batch) {
  const bool has_samples = row_splits != nullptr;
  CheckMultiple(table, limits, has_samples, has_samples ? batch : num_keys);
  if (has_samples) CheckSplits(table, limits, row_splits, batch, num_keys);
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
