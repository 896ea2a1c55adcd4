// Admission and eviction: the calls of CpuTable that read and write its records.
//
//     lookup    find -> missing, unique, by shard -> filter -> room | evict -> insert -> count
//
// Everything that can throw happens before the first key is evicted: a lookup that failed has
// changed nothing and is not counted.
// All work is by index shard, so records do not depend on the number of threads. Missing keys are
// sorted, so row numbers do not depend on the order of the keys.
#include <algorithm>
#include <new>

#include "cpp/core/cpu/records.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {

TableRecords& CpuTable::Impl::Records() const {
  RequireRecords(records != nullptr, options.name);
  return *records;
}

void CpuTable::Impl::PrepareLookup(Executor& ex, int64_t num_keys, LookupBatch* batch) {
  TableRecords& rec = *records;
  const uint64_t* const keys = batch->keys;
  uint32_t* const rows = batch->rows.get();
  batch->step = rec.step + 1;
  FindRows(ex, keys, num_keys, rows);
  arena->Bring(ex, rows, num_keys, RowUse::kWrite);
  const auto is_present = [rows](int64_t i) { return rows[i] != kNoRow; };
  const auto is_missing = [rows](int64_t i) { return rows[i] == kNoRow; };
  GroupByShard(ex, keys, num_keys, is_present, &batch->present);
  if (batch->present.total() < num_keys) {
    GroupByShard(ex, keys, num_keys, is_missing, &batch->missing);
    ClassifyMissing(ex, batch);
  }
  const auto append = [](const auto& from, int64_t first, int64_t count, auto* to) {
    to->insert(to->end(), from.begin() + first, from.begin() + first + count);
  };
  for (int s = 0; s < kNumShards; ++s) {
    const int64_t first = batch->missing.offsets[s], count = batch->num_admitted[s];
    append(batch->unique, first, count, &batch->new_keys);
    append(batch->counts, first, count, &batch->new_counts);
    append(batch->occurring, first, count, &batch->new_occurring);
  }
  const int64_t num_admitted = static_cast<int64_t>(batch->new_keys.size());
  batch->new_rows.assign(batch->new_keys.size(), kNoRow);
  if (rec.options.count_occurrences) batch->withheld.reserve(batch->new_keys.size());
  batch->insertion =
      std::make_unique<Insertion>(batch->new_keys.data(), num_admitted, batch->new_rows.data());
  batch->insertion->keys_are_unique = true;
  batch->insertion->kept_rows = rows;
  batch->insertion->num_kept_rows = num_keys;
  PrepareInsert(ex, batch->insertion.get());
}

void CpuTable::Impl::MakeLookup(Executor& ex, int64_t num_keys, LookupBatch* batch) {
  TableRecords& rec = *records;
  Touch(ex, batch->keys, batch->rows.get(), num_keys);  // new keys are touched by Insert
  Insert(ex, batch->insertion.get());
  const int64_t num_admitted = static_cast<int64_t>(batch->new_keys.size());
  rec.step = batch->step;
  rec.statistics.admitted += num_admitted;
  for (int64_t i = 0; i < num_admitted; ++i) {
    const uint32_t row = batch->new_rows[i];
    rec.Add(row, batch->new_keys[i], batch->new_counts[i], batch->step);
    rec.Enter(row);
    if (!rec.options.count_occurrences || rec.filter == nullptr) continue;
    const int64_t before = batch->new_counts[i] - batch->new_occurring[i];
    if (before < rec.options.filter_freq) batch->withheld.push_back(row);
  }
  std::sort(batch->withheld.begin(), batch->withheld.end());
  CountLookup(ex, batch);
}

int64_t CpuTable::Impl::ListMissing(int64_t shard, LookupBatch* batch) const {
  const ShardGroups& missing = batch->missing;
  const int64_t offset = missing.offsets[shard], count = missing.count(shard);
  const uint32_t* const positions = missing.positions.data() + offset;
  uint64_t* const unique = batch->unique.data() + offset;
  for (int64_t i = 0; i < count; ++i) unique[i] = batch->keys[positions[i]];
  std::sort(unique, unique + count);
  const int64_t n = std::unique(unique, unique + count) - unique;
  for (int64_t i = 0; records->options.count_occurrences && i < count; ++i) {
    const uint64_t key = batch->keys[positions[i]];
    const int64_t at = std::lower_bound(unique, unique + n, key) - unique;
    batch->occurring[offset + at] +=
        batch->occurrences == nullptr ? 1 : batch->occurrences[positions[i]];
  }
  return n;
}

void CpuTable::Impl::ClassifyMissing(Executor& ex, LookupBatch* batch) {
  AdmissionFilter* const filter = records->filter.get();
  const ShardGroups& missing = batch->missing;
  batch->unique.resize(missing.positions.size());
  batch->counts.resize(missing.positions.size());
  batch->occurring.resize(missing.positions.size());
  ex.ParallelFor(kNumShards, ShardGrain(missing.total()), [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> refused;
    std::vector<int64_t> refused_occurring;
    for (int64_t s = begin; s < end; ++s) {
      const int64_t offset = missing.offsets[s];
      const int64_t n = ListMissing(s, batch);
      uint64_t* const unique = batch->unique.data() + offset;
      int64_t* const occurring = batch->occurring.data() + offset;
      refused.clear();
      refused_occurring.clear();
      int64_t admitted = 0;
      constexpr int64_t kAhead = 8;
      for (int64_t i = 0; filter != nullptr && i < std::min(n, kAhead); ++i) {
        filter->Prefetch(HashKey(unique[i]));
      }
      for (int64_t i = 0; i < n; ++i) {
        if (filter != nullptr && i + kAhead < n) filter->Prefetch(HashKey(unique[i + kAhead]));
        const uint64_t key = unique[i];
        const int64_t times = occurring[i];
        const int64_t count = filter == nullptr
                                  ? std::max<int64_t>(times, 1)
                                  : filter->CountWith(HashKey(key), key, batch->step, times);
        if (filter != nullptr && count < records->options.filter_freq) {
          refused.push_back(key);
          refused_occurring.push_back(times);
        } else {
          unique[admitted] = key;
          occurring[admitted] = times;
          batch->counts[offset + admitted++] = count;
        }
      }
      std::copy(refused.begin(), refused.end(), unique + admitted);
      std::copy(refused_occurring.begin(), refused_occurring.end(), occurring + admitted);
      batch->num_admitted[s] = admitted;
      batch->num_refused[s] = n - admitted;
      if (filter != nullptr) filter->Reserve(static_cast<int>(s), n - admitted);
    }
  });
}

void CpuTable::Impl::CountLookup(Executor& ex, LookupBatch* lookup) {
  TableRecords& rec = *records;
  const LookupBatch& batch = *lookup;
  uint32_t* const rows = batch.rows.get();
  AdmissionFilter* const filter = rec.filter.get();
  const ShardGroups &present = batch.present, &missing = batch.missing;
  const int64_t step = batch.step;
  const bool pending = Pending();
  int64_t num_found[kNumShards] = {}, num_refused[kNumShards] = {};
  bool fell[kNumShards] = {};  // a last step decreased, since SetStep went back
  const int64_t grain = ShardGrain(present.total() + missing.total());
  ex.ParallelFor(kNumShards, grain, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      constexpr int64_t kAhead = 16;  // records prefetched, as rows in a lookup
      for (int64_t i = present.offsets[s]; i < present.offsets[s + 1]; ++i) {
        if (i + kAhead < present.total()) {
          __builtin_prefetch(&rec.records[rows[present.positions[i + kAhead]]], 1);
        }
        const uint32_t position = present.positions[i], row = rows[position];
        KeyRecord& record = rec.records[row];
        if (rec.options.count_occurrences) {
          record.frequency += batch.occurrences == nullptr ? 1 : batch.occurrences[position];
        }
        if (record.last_step == step) continue;
        // Once here, instead of when the row is read and again when it is updated.
        if (pending) catch_up->Apply(arena->Row(row));
        fell[s] |= record.last_step > step;
        if (!rec.options.count_occurrences) ++record.frequency;
        record.last_step = step;
        ++num_found[s];
      }
      const uint64_t* const unique = batch.unique.data() + missing.offsets[s];
      for (int64_t i = 0; filter != nullptr && i < batch.num_admitted[s]; ++i) {
        filter->Forget(HashKey(unique[i]), unique[i]);
      }
      for (int64_t i = 0; i < batch.num_refused[s]; ++i) {
        const int64_t at = batch.num_admitted[s] + i;
        num_refused[s] += filter->Count(HashKey(unique[at]), unique[at], step,
                                        batch.occurring[missing.offsets[s] + at]);
      }
      for (int64_t i = missing.offsets[s]; i < missing.offsets[s + 1]; ++i) {
        const uint64_t key = batch.keys[missing.positions[i]];
        rows[missing.positions[i]] = shards[s].Find(HashKey(key), key);
      }
    }
  });
  for (int s = 0; s < kNumShards; ++s) {
    rec.statistics.found += num_found[s];
    rec.statistics.refused += num_refused[s];
    if (fell[s]) rec.queue.Clear();
  }
  if (rec.options.bounds_waiting()) {
    try {
      rec.statistics.forgotten += filter->ForgetOldest(rec.options.max_waiting);
    } catch (const std::bad_alloc&) {
      // The lookup has been counted already. The next one tries again.
    }
  }
}

void CpuTable::Impl::RecordWritten(const Insertion& insertion) {
  TableRecords& rec = *records;
  for (uint32_t position : insertion.misses.positions) {
    const uint32_t row = insertion.rows[position];
    const uint64_t key = insertion.keys[position];
    if (rec.records[row].last_step >= 0) continue;  // was present after all
    rec.Add(row, key, /*frequency=*/0, rec.step);
    rec.Enter(row);
    ++rec.statistics.written;
    if (rec.filter != nullptr) rec.filter->Forget(HashKey(key), key);
  }
}

void CpuTable::Impl::CopyRecords(const uint32_t* row_numbers, int64_t num_keys,
                                 int64_t* out) const {
  for (int64_t i = 0; i < num_keys; ++i, out += 3) {
    if (row_numbers[i] == kNoRow) {
      std::fill_n(out, 3, 0);
      continue;
    }
    const KeyRecord& record = records->records[row_numbers[i]];
    out[0] = record.frequency;
    out[1] = record.last_step;
    out[2] = records->has_scores() ? records->scores[row_numbers[i]] : 0;
  }
}

void CpuTable::Impl::ImportRecords(const TableSnapshot& snapshot, const uint32_t* rows) {
  TableRecords& rec = *records;
  const RecordSnapshot& policy = snapshot.policy;
  if (policy.step >= 0) rec.step = policy.step;
  if (rec.filter != nullptr) rec.filter->Import(policy.waiting, policy.counters);
  const bool scored = rec.options.evicts_by_score();
  bool falls = false;
  for (size_t i = 0; 3 * i < policy.records.size(); ++i) {
    const int64_t* const record = policy.records.data() + 3 * i;
    const int64_t before = scored ? *rec.Score(rows[i]) : 0;
    rec.Add(rows[i], snapshot.keys[i], record[0], std::max<int64_t>(record[1], 0), record[2]);
    falls |= scored && *rec.Score(rows[i]) < before;
  }
  if (falls) rec.queue.Clear();  // its entries must not be above the scores
}

void CpuTable::RecordTrainingLookup(CallContext context, const uint64_t* keys, int64_t num_keys) {
  const ExclusiveLock lock(impl_->mutex);
  TrainingLookup lookup(context.threads(), *this, keys, nullptr, num_keys);
  lookup.Make(context.threads());
}

struct TrainingLookup::Impl {
  CpuTable::Impl& table;
  const int64_t num_keys;
  LookupBatch batch;
};

TrainingLookup::TrainingLookup(Executor& ex, CpuTable& table, const uint64_t* keys,
                               const int64_t* occurrences, int64_t num_keys) {
  table.impl_->Records();
  impl_.reset(new Impl{*table.impl_, num_keys, LookupBatch(keys, occurrences, num_keys)});
  table.impl_->PrepareLookup(ex, num_keys, &impl_->batch);
}

TrainingLookup::~TrainingLookup() = default;

void TrainingLookup::Make(Executor& ex) {
  impl_->table.MakeLookup(ex, impl_->num_keys, &impl_->batch);
}

uint32_t* TrainingLookup::rows() const { return impl_->batch.rows.get(); }
const std::vector<uint32_t>& TrainingLookup::withheld() const { return impl_->batch.withheld; }

void CpuTable::RecordAndRead(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                             uint8_t* inserted) {
  const ExclusiveLock lock(impl_->mutex);
  std::vector<int64_t> missing;
  TrainingLookup lookup(ex, *this, keys, nullptr, num_keys);
  uint32_t* const row_numbers = lookup.rows();
  for (int64_t i = 0; inserted != nullptr && i < num_keys; ++i) {
    if (row_numbers[i] == kNoRow) missing.push_back(i);
  }
  // The last that may fail. No new key gets a higher row number.
  RowMarks& marks = impl_->records->marks;
  marks.Reserve(impl_->next_row + static_cast<int64_t>(missing.size()));
  lookup.Make(ex);
  for (int64_t i : missing) {
    if (row_numbers[i] != kNoRow) inserted[i] = marks.Mark(row_numbers[i]);
  }
  for (int64_t i : missing) {
    if (row_numbers[i] != kNoRow) marks.Unmark(row_numbers[i]);
  }
  ex.ParallelFor(num_keys, 2048, [&](int64_t begin, int64_t end) {
    impl_->ReadRange(keys + begin, end - begin, row_numbers + begin, rows + begin * dim());
  });
  const std::vector<uint32_t>& withheld = lookup.withheld();
  for (int64_t i = 0; !withheld.empty() && i < num_keys; ++i) {
    if (std::binary_search(withheld.begin(), withheld.end(), row_numbers[i])) {
      MissingRow(keys[i], rows + i * dim());
    }
  }
}

PolicyCounts CpuTable::Statistics(CallContext) const {
  const SharedLock lock(impl_->mutex);
  const TableRecords& rec = impl_->Records();
  PolicyCounts statistics = rec.statistics;
  statistics.size = impl_->size;
  statistics.seen = statistics.found + statistics.admitted + statistics.refused;
  statistics.buffered = rec.buffer.size();
  statistics.waiting = rec.filter == nullptr ? 0 : rec.filter->num_waiting();
  statistics.step = rec.step;
  return statistics;
}

void CpuTable::KeyStatistics(CallContext, const uint64_t* keys, int64_t num_keys, uint8_t* present,
                             int64_t* frequencies, int64_t* last_steps) const {
  const SharedLock lock(impl_->mutex);
  const TableRecords& rec = impl_->Records();
  const Scratch<uint32_t> rows(num_keys);
  impl_->FindRange(keys, num_keys, rows.get());
  for (int64_t i = 0; i < num_keys; ++i) {
    present[i] = rows[i] != kNoRow;
    WaitingKey seen{keys[i], 0, -1};
    if (present[i]) {
      seen = {keys[i], rec.records[rows[i]].frequency, rec.records[rows[i]].last_step};
    } else if (rec.filter != nullptr) {
      seen = rec.filter->Find(HashKey(keys[i]), keys[i]);
    }
    frequencies[i] = seen.count;
    last_steps[i] = seen.last_step;
  }
}

int64_t CpuTable::AssignScores(CallContext context, const uint64_t* keys, int64_t num_keys,
                               const int64_t* scores) {
  const ExclusiveLock lock(impl_->mutex);
  TableRecords& rec = impl_->Records();
  RequireCustomScore(rec.options.score, impl_->options.name);
  const Scratch<uint32_t> rows(num_keys);
  impl_->FindRange(keys, num_keys, rows.get());
  if (rec.queue.num_rows() > 0) rec.queue.Reserve(num_keys);
  int64_t num_assigned = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    if (rows[i] == kNoRow) continue;
    impl_->Touch(context.threads(), &keys[i], &rows[i], 1);
    const bool falls = scores[i] < rec.scores[rows[i]];
    rec.scores[rows[i]] = scores[i];
    if (falls) rec.Enter(rows[i]);
    ++num_assigned;
  }
  return num_assigned;
}

void CpuTable::SetStep(int64_t step) {
  const ExclusiveLock lock(impl_->mutex);
  TableRecords& rec = impl_->Records();
  CheckTableStep(step, impl_->options.name);
  rec.step = step;
}

void CpuTable::CountDroppedGradients(int64_t num_keys) {
  impl_->Records().statistics.dropped_gradients += num_keys;
}

void TableRecords::Clear() {
  step = 0;
  statistics = PolicyCounts();
  records.Clear();
  scores.Clear();
  marks.Clear();
  if (filter != nullptr) filter->Clear();
  queue.Clear();
  buffer.Clear();
}

}  // namespace sok
