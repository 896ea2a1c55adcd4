#include "cpp/core/cpu/lookup.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "cpp/core/cpu/change_log.h"
#include "cpp/core/cpu/combine_blocks.h"
#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/route.h"
#include "cpp/core/cpu/row_format.h"
#include "cpp/core/cpu/row_ops.h"
#include "cpp/core/cpu/scratch.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 1024;    // keys worth handing to another thread
constexpr int64_t kRowsAhead = 12;  // rows asked for before they are read

// Needs the exclusive lock.
void CombineInserted(Executor& ex, CpuTable& table, const FeatureLookup& feature) {
  const int64_t num_unique = feature.num_unique;
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  table.FindOrInsertRows(ex, feature.unique_keys, num_unique, numbers.get());
  table.RememberRows(feature.unique_keys, num_unique, numbers.get());
  const RowCatchUp* catch_up = table.catch_up().get();
  const bool pending = catch_up != nullptr && catch_up->pending();
  ex.ParallelFor(num_unique, kGrain, [&](int64_t begin, int64_t end) {
    table.Rows(numbers.get() + begin, end - begin, rows.get() + begin);
    for (int64_t i = begin; pending && i < end; ++i) catch_up->Apply(table.Row(numbers[i]));
  });
  if (pending && table.changes() != nullptr) {
    table.changes()->Touch(feature.unique_keys, numbers.get(), num_unique);
  }
  const bool narrow = table.format().is_narrow();
  const int64_t narrow_floats = table.format().embedding_floats();
  const Scratch<float> widened(narrow ? num_unique * table.dim() : 0);
  ex.ParallelFor(narrow ? num_unique : 0, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) PrefetchRow<false>(rows[i + kRowsAhead], narrow_floats);
      float* const row = widened.get() + i * table.dim();
      table.format().Read(rows[i], row);
      rows[i] = row;
    }
  });
  CombineRows(ex, feature.samples, rows.get(), num_unique, table.dim(), feature.out);
}

using RowNumbers = std::vector<uint32_t>;  // ascending

bool Contains(const RowNumbers& rows, uint32_t row) {
  return !rows.empty() && std::binary_search(rows.begin(), rows.end(), row);
}

// samples.inverse reads the rows of `keys`. Those of `withheld` read what missing keys read. Needs a
// lock.
void CombineFound(Executor& ex, const CpuTable& table, const uint64_t* keys, int64_t num_unique,
                  const Samples& samples, float* out, const RowNumbers& withheld) {
  const int64_t dim = table.dim();
  const Scratch<uint32_t> numbers(num_unique);
  const Scratch<const float*> rows(num_unique);
  table.FindRows(ex, keys, num_unique, numbers.get());
  table.BringRows(ex, numbers.get(), num_unique, /*writes=*/false);
  const RowCatchUp* catch_up = table.catch_up().get();
  const bool pending = catch_up != nullptr && catch_up->pending();
  const bool readable = !pending && !table.format().is_narrow();  // where they lie
  std::atomic<bool> all_in_place{readable && withheld.empty()};
  ex.ParallelFor(all_in_place ? num_unique : 0, kGrain, [&](int64_t begin, int64_t end) {
    const uint32_t* const first = numbers.get() + begin;
    if (std::find(first, first + (end - begin), kNoRow) != first + (end - begin)) {
      all_in_place = false;
    } else {
      table.Rows(first, end - begin, rows.get() + begin);
    }
  });
  std::vector<int64_t> made_up;  // keys whose row is not readable in place
  for (int64_t i = 0; !all_in_place && i < num_unique; ++i) {
    if (Contains(withheld, numbers[i])) numbers[i] = kNoRow;
    if (numbers[i] == kNoRow || !readable) {
      made_up.push_back(i);
    } else {
      rows[i] = table.Row(numbers[i]);
    }
  }
  const int64_t row_floats = table.format().embedding_floats();
  const Scratch<float> scratch(static_cast<int64_t>(made_up.size()) * dim);
  ex.ParallelFor(made_up.size(), kGrain / 4, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const uint32_t ahead = numbers[made_up[std::min(k + kRowsAhead, end - 1)]];
      if (ahead != kNoRow) PrefetchRow<false>(table.Row(ahead), row_floats);
      const int64_t i = made_up[k];
      float* row = scratch.get() + k * dim;
      if (numbers[i] == kNoRow) {
        table.MissingRow(keys[i], row);
      } else {
        table.ReadRow(numbers[i], row);
      }
      rows[i] = row;
    }
  });
  CombineRows(ex, samples, rows.get(), num_unique, dim, out);
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

// Keys of a training lookup of a table with policies, and how often each occurs, where the table
// counts that.
struct SeenKeys {
  std::vector<uint64_t> keys;
  std::vector<int64_t> occurrences;

  // Needs the exclusive lock.
  RowNumbers Record(Executor& ex, CpuTable& table) const {
    return table.RecordTrainingRows(
        ex, keys.data(), table.counts_occurrences() ? occurrences.data() : nullptr, keys.size());
  }
  void Add(const FeatureLookup& feature) {
    const size_t first = keys.size();
    keys.insert(keys.end(), feature.unique_keys, feature.unique_keys + feature.num_unique);
    if (!feature.table->counts_occurrences()) return;
    occurrences.resize(keys.size());
    for (int64_t i = 0; i < feature.samples.num_keys; ++i) {
      ++occurrences[first + feature.inverse[i]];
    }
  }
  void Add(const RowRequest& request) {
    keys.insert(keys.end(), request.keys, request.keys + request.num_keys);
    if (!request.table->counts_occurrences()) return;
    if (request.occurrences == nullptr) {
      occurrences.resize(keys.size(), 1);
    } else {
      occurrences.insert(occurrences.end(), request.occurrences,
                         request.occurrences + request.num_keys);
    }
  }
};

// Overwrites the rows that a lookup must not read.
void Withhold(Executor& ex, const CpuTable& table, const RowNumbers& withheld,
              const RowRequest& request) {
  if (withheld.empty()) return;
  const Scratch<uint32_t> numbers(request.num_keys);
  table.FindRows(ex, request.keys, request.num_keys, numbers.get());
  for (int64_t i = 0; i < request.num_keys; ++i) {
    if (!Contains(withheld, numbers[i])) continue;
    table.MissingRow(request.keys[i], request.rows + i * table.dim());
  }
}

// A lookup that inserts nothing: each key is found by itself, however often it occurs.
void CombineByKey(Executor& ex, const CpuTable& table, const FeatureLookup& feature) {
  const int64_t num_keys = feature.samples.num_keys;
  const RowCatchUp* catch_up = table.catch_up().get();
  Samples samples = feature.samples;
  if (catch_up != nullptr && catch_up->pending()) {
    // To replay the steps that a row owes costs more than to find out which keys repeat.
    const Scratch<uint64_t> unique(num_keys);
    const Scratch<int32_t> inverse(num_keys);
    const int64_t n = UniqueKeys(ex, feature.keys, num_keys, unique.get(), inverse.get());
    samples.inverse = inverse.get();
    CombineFound(ex, table, unique.get(), n, samples, feature.out, {});
    return;
  }
  if (feature.samples.combiner == Combiner::kNone && feature.samples.weights == nullptr) {
    table.Read(ex, feature.keys, num_keys, feature.out, nullptr);
    return;
  }
  CombineBlocks(ex, table, feature.keys, samples, feature.out);
}

int64_t NumKeys(const FeatureLookup& feature) { return feature.samples.num_keys; }
int64_t NumKeys(const RowRequest& request) { return request.num_keys; }

// The places of one table's items in a call.
struct Members {
  const int64_t* places;  // [count]
  int64_t count;

  const int64_t* begin() const { return places; }
  const int64_t* end() const { return places + count; }
};

// Calls fn(executor, table, members) for every table. All tables are locked, exclusively to insert,
// and rows on disk have been fetched.
template <typename Item, typename Fn>
void ForEachTable(Executor& ex, const std::vector<Item>& items, bool insert, const Fn& fn) {
  std::vector<CpuTable*> tables;
  std::vector<int64_t> num_keys;
  tables.reserve(items.size());
  num_keys.reserve(items.size());
  for (const Item& item : items) {
    tables.push_back(item.table);
    num_keys.push_back(NumKeys(item));
  }
  const TableGroup group(tables);
  const TableGroup::Lock lock(group, /*exclusive=*/insert);
  for (const Item& item : items) item.table->BringKeys(ex, item.keys, NumKeys(item), insert);
  group.ForEach(ex, num_keys, [&](Executor& inner, const int64_t* places, int64_t count) {
    fn(inner, *tables[places[0]], Members{places, count});
  });
}

// Records a training lookup of a table's items, if it keeps records: keys that are to be inserted
// then have been. Returns what SeenKeys::Record does.
template <typename Item>
RowNumbers RecordMembers(Executor& ex, CpuTable& table, const std::vector<Item>& items,
                         const Members& members) {
  if (!table.keeps_records()) return {};
  SeenKeys seen;
  for (int64_t i : members) seen.Add(items[i]);
  return seen.Record(ex, table);
}

}  // namespace

void LookupGroup(Executor& ex, std::vector<FeatureLookup>* features, bool insert) {
  std::vector<FeatureLookup>& lookups = *features;
  ForEachTable(ex, lookups, insert, [&](Executor& inner, CpuTable& table, Members members) {
    if (!insert) {
      for (int64_t i : members) CombineByKey(inner, table, lookups[i]);
      return;
    }
    for (int64_t i : members) {
      FeatureLookup& feature = lookups[i];
      feature.num_unique =
          UniqueKeys(inner, feature.keys, NumKeys(feature), feature.unique_keys, feature.inverse);
      feature.samples.inverse = feature.inverse;
    }
    const RowNumbers withheld = RecordMembers(inner, table, lookups, members);
    for (int64_t i : members) {
      const FeatureLookup& feature = lookups[i];
      if (table.keeps_records()) {
        CombineFound(inner, table, feature.unique_keys, feature.num_unique, feature.samples,
                     feature.out, withheld);
      } else {
        CombineInserted(inner, table, feature);
      }
    }
  });
}

void ReadGroup(Executor& ex, const std::vector<RowRequest>& requests, bool insert) {
  ForEachTable(ex, requests, insert, [&](Executor& inner, CpuTable& table, Members members) {
    const RowNumbers withheld =
        insert ? RecordMembers(inner, table, requests, members) : RowNumbers();
    for (int64_t i : members) {
      const RowRequest& request = requests[i];
      if (insert && !table.keeps_records()) {
        table.ReadOrInsert(inner, request.keys, request.num_keys, request.rows);
      } else {
        table.Read(inner, request.keys, request.num_keys, request.rows, nullptr);
        Withhold(inner, table, withheld, request);
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
