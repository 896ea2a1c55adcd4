#include "cpp/core/cpu/lookup.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

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
constexpr int64_t kSplitsGrain = 32768;

using RowNumbers = std::vector<uint32_t>;  // ascending

bool Contains(const RowNumbers& rows, uint32_t row) {
  return !rows.empty() && std::binary_search(rows.begin(), rows.end(), row);
}

// The rows of unique keys, to be read as floats while the table is locked.
class UniqueRows {
 public:
  UniqueRows(CpuTable& table, const uint64_t* keys, int64_t num_keys)
      : table_(table), keys_(keys), num_keys_(num_keys), numbers_(num_keys), rows_(num_keys) {}

  // Inserts missing keys, and hands the row numbers over for the update. Needs the exclusive lock.
  void Insert(Executor& ex) {
    table_.FindOrInsertRows(ex, keys_, num_keys_, numbers_.get(), /*keys_are_unique=*/true);
    const RowCatchUp* catch_up = table_.catch_up().get();
    const bool pending = catch_up != nullptr && catch_up->pending();
    if (pending) table_.Touch(ex, keys_, numbers_.get(), num_keys_);
    ex.ParallelFor(num_keys_, kGrain, [&](int64_t begin, int64_t end) {
      table_.Rows(numbers_.get() + begin, end - begin, rows_.get() + begin);
      for (int64_t i = begin; pending && i < end; ++i) catch_up->Apply(table_.Row(numbers_[i]));
    });
    table_.RememberRows(ex, keys_, num_keys_, std::move(numbers_));
    if (table_.format().is_narrow()) Widen(ex);
  }

  // Takes the memory of Find. `all_present`: no key will be missing or withheld.
  void Reserve(bool all_present) {
    if (all_present && readable()) return;
    made_up_ = Scratch<int64_t>(num_keys_);
    made_ = Scratch<float>(num_keys_ * table_.dim());
  }

  // Missing keys, and those with a row in `withheld`, read what missing keys read. Does not fail.
  void Find(Executor& ex, const RowNumbers& withheld) {
    table_.FindRows(ex, keys_, num_keys_, numbers_.get());
    std::atomic<bool> all_in_place{readable() && withheld.empty()};
    ex.ParallelFor(all_in_place ? num_keys_ : 0, kGrain, [&](int64_t begin, int64_t end) {
      const uint32_t* const first = numbers_.get() + begin;
      if (std::find(first, first + (end - begin), kNoRow) != first + (end - begin)) {
        all_in_place = false;
      } else {
        table_.Rows(first, end - begin, rows_.get() + begin);
      }
    });
    int64_t num_made_up = 0;  // keys whose row is not readable in place
    for (int64_t i = 0; !all_in_place && i < num_keys_; ++i) {
      if (Contains(withheld, numbers_[i])) numbers_[i] = kNoRow;
      if (numbers_[i] == kNoRow || !readable()) {
        made_up_[num_made_up++] = i;
      } else {
        rows_[i] = table_.Row(numbers_[i]);
      }
    }
    MakeUp(ex, num_made_up);
  }

  // Combines the rows that samples.inverse names.
  void Combine(Executor& ex, const Samples& samples, float* out) const {
    CombineRows(ex, samples, rows_.get(), num_keys_, table_.dim(), out);
  }

 private:
  bool readable() const {  // where they lie
    const RowCatchUp* catch_up = table_.catch_up().get();
    return (catch_up == nullptr || !catch_up->pending()) && !table_.format().is_narrow();
  }

  void Widen(Executor& ex) {
    const int64_t dim = table_.dim(), narrow_floats = table_.format().embedding_floats();
    made_ = Scratch<float>(num_keys_ * dim);
    ex.ParallelFor(num_keys_, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kRowsAhead < end) PrefetchRow<false>(rows_[i + kRowsAhead], narrow_floats);
        float* const row = made_.get() + i * dim;
        table_.format().Read(rows_[i], row);
        rows_[i] = row;
      }
    });
  }

  void MakeUp(Executor& ex, int64_t count) {
    const int64_t dim = table_.dim(), row_floats = table_.format().embedding_floats();
    const Scratch<int64_t>& keys = made_up_;
    ex.ParallelFor(count, kGrain / 4, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const uint32_t ahead = numbers_[keys[std::min(k + kRowsAhead, end - 1)]];
        if (ahead != kNoRow) PrefetchRow<false>(table_.Row(ahead), row_floats);
        const int64_t i = keys[k];
        float* const row = made_.get() + k * dim;
        if (numbers_[i] == kNoRow) {
          table_.MissingRow(keys_[i], row);
        } else {
          table_.ReadRow(numbers_[i], row);
        }
        rows_[i] = row;
      }
    });
  }

  CpuTable& table_;
  const uint64_t* const keys_;  // [num_keys]
  const int64_t num_keys_;
  Scratch<uint32_t> numbers_;   // [num_keys]
  Scratch<const float*> rows_;  // [num_keys] into the arena or made_
  Scratch<int64_t> made_up_;    // [num_keys] keys whose rows cannot be read where they lie
  Scratch<float> made_;         // these rows
};

// The rows of the feature's keys, to where they belong.
void Combine(Executor& ex, const UniqueRows& rows, const FeatureLookup& feature, Samples samples) {
  if (feature.key_rows != nullptr) {
    Samples by_key;
    by_key.inverse = samples.inverse;
    by_key.num_keys = samples.num_keys;
    by_key.combiner = Combiner::kNone;
    rows.Combine(ex, by_key, feature.key_rows);
  }
  if (feature.blocks.empty()) return rows.Combine(ex, samples, feature.out);
  for (const RowBlock& block : feature.blocks) {
    samples.num_keys = block.num_keys;
    rows.Combine(ex, samples, block.rows);
    samples.inverse += block.num_keys;
  }
}

void CheckSplits(Executor& ex, const std::string& table, const BatchLimits& limits,
                 const int64_t* row_splits, int64_t batch, int64_t num_keys) {
  CheckEnds(table, row_splits[0], row_splits[batch], num_keys);
  // Mostly all is well, and a loop without branches says so.
  const int64_t most_keys = limits.max_hotness > 0 ? limits.max_hotness : num_keys;
  std::atomic<bool> is_wrong{false};
  ex.ParallelFor(batch, kSplitsGrain, [&](int64_t first, int64_t last) {
    bool any = false;
    for (int64_t b = first; b < last; ++b) {
      const int64_t hotness = row_splits[b + 1] - row_splits[b];
      any |= (hotness < 0) | (hotness > most_keys);
    }
    if (any) is_wrong = true;
  });
  for (int64_t b = 0; is_wrong && b < batch; ++b) {
    if (SampleIsLegal(limits, row_splits[b], row_splits[b + 1])) continue;
    RefuseSample(table, limits, b, row_splits[b], row_splits[b + 1]);
  }
}

// The training lookup of a table with policies: one for all its features, those at `places`. Made
// ready, which may fail and changes nothing, then made. Needs the exclusive lock.
class RecordedLookup {
 public:
  RecordedLookup(Executor& ex, CpuTable& table, const std::vector<FeatureLookup>& lookups,
                 const int64_t* places, int64_t count) {
    const bool counts = table.counts_occurrences();
    features_.reserve(count);
    rows_.reserve(count);
    for (const int64_t* place = places; place < places + count; ++place) {
      const FeatureLookup& feature = lookups[*place];
      features_.push_back(&feature);
      rows_.emplace_back(table, feature.unique_keys, feature.num_unique);
      rows_.back().Reserve(/*all_present=*/!table.filters());
      const size_t first = keys_.size();
      keys_.insert(keys_.end(), feature.unique_keys, feature.unique_keys + feature.num_unique);
      if (!counts) continue;
      occurrences_.resize(keys_.size());
      for (int64_t k = 0; k < feature.samples.num_keys; ++k) {
        occurrences_[first + feature.inverse[k]] +=
            feature.occurrences == nullptr ? 1 : feature.occurrences[k];
      }
    }
    lookup_.emplace(ex, table, keys_.data(), counts ? occurrences_.data() : nullptr,
                    static_cast<int64_t>(keys_.size()));
  }

  // Does not fail. Rows on disk have been brought to memory by the first part.
  void Make(Executor& ex) {
    lookup_->Make(ex);
    for (size_t f = 0; f < rows_.size(); ++f) {
      rows_[f].Find(ex, lookup_->withheld());
      Combine(ex, rows_[f], *features_[f], Simplified(ex, features_[f]->samples));
    }
  }

 private:
  std::vector<const FeatureLookup*> features_;
  std::vector<UniqueRows> rows_;  // of the features
  std::vector<uint64_t> keys_;
  std::vector<int64_t> occurrences_;  // of each key, if the table counts them
  std::optional<TrainingLookup> lookup_;
};

// A lookup that inserts nothing: each key is found by itself, however often it occurs.
void CombineByKey(Executor& ex, CpuTable& table, const FeatureLookup& feature) {
  const int64_t num_keys = feature.samples.num_keys;
  const RowCatchUp* catch_up = table.catch_up().get();
  Samples samples = Simplified(ex, feature.samples);
  if (catch_up != nullptr && catch_up->pending()) {
    // To replay the steps that a row owes costs more than to find out which keys repeat.
    const Scratch<uint64_t> unique(num_keys);
    const Scratch<int32_t> inverse(num_keys);
    const int64_t n = UniqueKeys(ex, feature.keys, num_keys, unique.get(), inverse.get());
    samples.inverse = inverse.get();
    UniqueRows rows(table, unique.get(), n);
    rows.Reserve(/*all_present=*/false);
    rows.Find(ex, {});
    return Combine(ex, rows, feature, samples);
  }
  if (feature.key_rows != nullptr) {
    table.Read(ex, feature.keys, num_keys, feature.key_rows, nullptr);
  }
  if (samples.combiner != Combiner::kNone || samples.weights != nullptr) {
    return CombineBlocks(ex, table, feature.keys, samples, feature.out);
  }
  if (feature.blocks.empty()) return table.Read(ex, feature.keys, num_keys, feature.out, nullptr);
  const uint64_t* keys = feature.keys;
  for (const RowBlock& block : feature.blocks) {
    table.Read(ex, keys, block.num_keys, block.rows, nullptr);
    keys += block.num_keys;
  }
}

}  // namespace

void LookupGroup(Executor& ex, std::vector<FeatureLookup>* features, bool insert) {
  std::vector<FeatureLookup>& lookups = *features;
  std::vector<CpuTable*> tables;
  std::vector<int64_t> num_keys;
  tables.reserve(lookups.size());
  num_keys.reserve(lookups.size());
  for (const FeatureLookup& feature : lookups) {
    tables.push_back(feature.table);
    num_keys.push_back(feature.samples.num_keys);
  }
  const TableGroup group(tables);
  const TableGroup::Lock lock(group, /*exclusive=*/insert);
  for (const FeatureLookup& feature : lookups) {
    feature.table->BringKeys(ex, feature.keys, feature.samples.num_keys, insert);
  }
  // Tables with policies are made ready first: if another table fails, none of them has counted the
  // lookup or evicted a key.
  std::vector<std::unique_ptr<RecordedLookup>> recorded(lookups.size());  // by first place
  const std::vector<int64_t> of_tables = group.PerTable(num_keys);
  group.ForEach(ex, of_tables, [&](Executor& inner, const int64_t* places, int64_t count) {
    CpuTable& table = *tables[places[0]];
    for (const int64_t* place = places; place < places + count; ++place) {
      FeatureLookup& feature = lookups[*place];
      if (!insert) {
        CombineByKey(inner, table, feature);
        continue;
      }
      feature.num_unique = UniqueKeys(inner, feature.keys, feature.samples.num_keys,
                                      feature.unique_keys, feature.inverse);
      feature.samples.inverse = feature.inverse;
      if (table.keeps_records()) continue;
      UniqueRows rows(table, feature.unique_keys, feature.num_unique);
      rows.Insert(inner);
      Combine(inner, rows, feature, Simplified(inner, feature.samples));
    }
    if (!insert || !table.keeps_records()) return;
    recorded[places[0]] = std::make_unique<RecordedLookup>(inner, table, lookups, places, count);
  });
  if (std::none_of(tables.begin(), tables.end(),
                   [insert](const CpuTable* table) { return insert && table->keeps_records(); })) {
    return;
  }
  group.ForEach(ex, of_tables, [&](Executor& inner, const int64_t* places, int64_t) {
    if (recorded[places[0]] != nullptr) recorded[places[0]]->Make(inner);
  });
}

void CheckBatch(Executor& ex, const std::string& table, const BatchLimits& limits,
                const uint64_t* keys, int64_t num_keys, const int64_t* row_splits, int64_t batch) {
  const bool has_samples = row_splits != nullptr;
  CheckMultiple(table, limits, has_samples, has_samples ? batch : num_keys);
  if (has_samples) CheckSplits(ex, table, limits, row_splits, batch, num_keys);
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
