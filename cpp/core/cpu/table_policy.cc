// Admission and eviction: the calls of CpuTable that read and write its records.
//
//     lookup    find -> missing, unique, by shard -> filter -> room, evicting -> insert -> count
//
// Everything that can throw happens before the first count: a lookup that failed is not counted.
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

void CpuTable::Impl::RecordTrainingLookup(Executor& ex, const uint64_t* keys,
                                          const int64_t* occurrences, int64_t num_keys,
                                          uint32_t* rows, std::vector<uint32_t>* withheld) {
  TableRecords& rec = *records;
  LookupBatch batch;
  batch.step = rec.step + 1;
  batch.keys = keys;
  batch.occurrences = occurrences;
  FindRows(ex, keys, num_keys, rows);
  arena->Bring(ex, rows, num_keys, RowUse::kWrite);
  const auto is_present = [rows](int64_t i) { return rows[i] != kNoRow; };
  const auto is_missing = [rows](int64_t i) { return rows[i] == kNoRow; };
  GroupByShard(ex, keys, num_keys, is_present, &batch.present);
  if (batch.present.total() < num_keys) {
    GroupByShard(ex, keys, num_keys, is_missing, &batch.missing);
    ClassifyMissing(ex, &batch);
  }

  // The admitted keys of all shards, in an order that is a function of the keys alone.
  std::vector<uint64_t> new_keys;
  std::vector<int64_t> new_counts, new_occurring;
  for (int s = 0; s < kNumShards; ++s) {
    const int64_t first = batch.missing.offsets[s], last = first + batch.num_admitted[s];
    new_keys.insert(new_keys.end(), batch.unique.begin() + first, batch.unique.begin() + last);
    new_counts.insert(new_counts.end(), batch.counts.begin() + first, batch.counts.begin() + last);
    new_occurring.insert(new_occurring.end(), batch.occurring.begin() + first,
                         batch.occurring.begin() + last);
  }
  const int64_t num_admitted = static_cast<int64_t>(new_keys.size());
  std::vector<uint32_t> new_rows(new_keys.size(), kNoRow);
  rec.Reserve(next_row + num_admitted, num_admitted);
  MakeRoomByScore(num_admitted, rows, num_keys);
  ShardGroups groups;
  InsertMissing(ex, new_keys.data(), num_admitted, new_rows.data(), nullptr, &groups);
  for (int64_t i = 0; rec.options.count_occurrences && i < num_admitted; ++i) {
    const int64_t before = new_counts[i] - new_occurring[i];
    if (rec.filter != nullptr && before < rec.options.filter_freq) withheld->push_back(new_rows[i]);
  }
  std::sort(withheld->begin(), withheld->end());

  // From here on nothing fails.
  rec.step = batch.step;
  rec.statistics.admitted += num_admitted;
  for (int64_t i = 0; i < num_admitted; ++i) {
    rec.Add(new_rows[i], new_keys[i], new_counts[i], batch.step);
    rec.Enter(new_rows[i]);
  }
  CountLookup(ex, batch, rows);
  Touch(keys, rows, num_keys);
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
      for (int64_t i = 0; i < n; ++i) {
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

void CpuTable::Impl::CountLookup(Executor& ex, const LookupBatch& batch, uint32_t* rows) {
  TableRecords& rec = *records;
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

void CpuTable::Impl::PrepareToWrite(const uint64_t* keys, const uint32_t* rows, int64_t num_keys) {
  std::vector<uint64_t> missing;
  for (int64_t i = 0; i < num_keys; ++i) {
    if (rows[i] == kNoRow) missing.push_back(keys[i]);
  }
  std::sort(missing.begin(), missing.end());
  const int64_t num_new = std::unique(missing.begin(), missing.end()) - missing.begin();
  records->Reserve(next_row + static_cast<int64_t>(missing.size()), num_new);
  MakeRoomByScore(num_new, rows, num_keys);
}

void CpuTable::Impl::RecordWritten(const uint64_t* keys, const uint32_t* rows,
                                   const ShardGroups& misses) {
  TableRecords& rec = *records;
  for (uint32_t position : misses.positions) {
    const uint32_t row = rows[position];
    if (rec.records[row].last_step >= 0) continue;  // was present after all, or occurred twice
    rec.Add(row, keys[position], /*frequency=*/0, rec.step);
    rec.Enter(row);
    ++rec.statistics.written;
    if (rec.filter != nullptr) rec.filter->Forget(HashKey(keys[position]), keys[position]);
  }
}

void CpuTable::Impl::CopyRecords(const uint32_t* row_numbers, int64_t num_keys,
                                 int64_t* out) const {
  for (int64_t i = 0; i < num_keys; ++i, out += 3) {
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
  for (size_t i = 0; 3 * i < policy.records.size(); ++i) {
    const int64_t* const record = policy.records.data() + 3 * i;
    rec.Add(rows[i], snapshot.keys[i], record[0], std::max<int64_t>(record[1], 0), record[2]);
  }
  rec.queue.Clear();  // scores may have fallen
}

void CpuTable::RecordTrainingLookup(CallContext context, const uint64_t* keys, int64_t num_keys) {
  const ExclusiveLock lock(impl_->mutex);
  RecordTrainingRows(context.threads(), keys, nullptr, num_keys);
}

std::vector<uint32_t> CpuTable::RecordTrainingRows(Executor& ex, const uint64_t* keys,
                                                   const int64_t* occurrences, int64_t num_keys) {
  impl_->Records();
  const Scratch<uint32_t> rows(num_keys);
  std::vector<uint32_t> withheld;
  impl_->RecordTrainingLookup(ex, keys, occurrences, num_keys, rows.get(), &withheld);
  return withheld;
}

void CpuTable::RecordAndRead(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                             uint8_t* inserted) {
  const Scratch<uint32_t> row_numbers(num_keys);
  std::vector<int64_t> missing;
  const ExclusiveLock lock(impl_->mutex);
  if (inserted != nullptr) {
    impl_->FindRange(keys, num_keys, row_numbers.get());
    for (int64_t i = 0; i < num_keys; ++i) {
      if (row_numbers[i] == kNoRow) missing.push_back(i);
    }
  }
  std::vector<uint32_t> withheld;
  impl_->RecordTrainingLookup(ex, keys, nullptr, num_keys, row_numbers.get(), &withheld);
  std::vector<bool> is_marked(missing.empty() ? 0 : static_cast<size_t>(impl_->next_row));
  for (int64_t i : missing) {
    if (row_numbers[i] == kNoRow) continue;
    inserted[i] = !is_marked[row_numbers[i]];
    is_marked[row_numbers[i]] = true;
  }
  impl_->arena->Bring(ex, row_numbers.get(), num_keys, RowUse::kWrite);
  ex.ParallelFor(num_keys, 2048, [&](int64_t begin, int64_t end) {
    impl_->ReadRange(keys + begin, end - begin, row_numbers.get() + begin, rows + begin * dim());
  });
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

int64_t CpuTable::AssignScores(CallContext, const uint64_t* keys, int64_t num_keys,
                               const int64_t* scores) {
  const ExclusiveLock lock(impl_->mutex);
  TableRecords& rec = impl_->Records();
  RequireCustomScore(rec.options.score, impl_->options.name);
  const Scratch<uint32_t> rows(num_keys);
  impl_->FindRange(keys, num_keys, rows.get());
  if (rec.queue.is_built()) rec.queue.Reserve(num_keys);
  int64_t num_assigned = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    if (rows[i] == kNoRow) continue;
    impl_->Touch(&keys[i], &rows[i], 1);
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
  std::vector<KeyRecord>().swap(records);
  std::vector<int64_t>().swap(scores);
  if (filter != nullptr) filter->Clear();
  queue.Clear();
  buffer.Clear();
}

}  // namespace sok
