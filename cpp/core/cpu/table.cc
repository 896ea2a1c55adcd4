// Lookup, and the whole calls of CpuTable that are made of it.
#include "cpp/core/cpu/table.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>
#include <stdexcept>
#include <utility>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

// Keys in flight at a time: enough to cover the latency of memory, few enough to stay in L1.
constexpr int kBlock = 64;
// Below this a range is not worth another thread.
constexpr int64_t kReadGrain = 2048;
constexpr int64_t kCopyGrain = 16384;  // to copy or compare keys

const TableOptions& Validated(const TableOptions& options) {
  options.Validate();
  return options;
}

void CheckBatch(int64_t num_keys, const TableOptions& options) {
  if (num_keys < 0 || num_keys >= int64_t{kNoRow}) {
    throw std::invalid_argument("A batch must have between 0 and 2^32 - 2 keys. Received: " +
                                std::to_string(num_keys) + " (table '" + options.name + "')");
  }
}

}  // namespace

CpuTable::Impl::Impl(const TableOptions& table_options, std::shared_ptr<BlockPool> shared_pool)
    : options(Validated(table_options)),
      initializer(MakeInitializer(options.initializer, options.seed,
                                  HashName(options.name.data(), options.name.size()), options.dim)),
      format(options.row_type, options.dim, initializer),
      direct(DirectRowsOf(options)),
      pool(std::move(shared_pool)),
      arena(new Arena(format.embedding_floats(), options.storage, options.name, pool.get())) {
  for (int s = 0; s < kNumShards; ++s) {
    shards[s].UsePool(pool.get());
    shards[s].GrowAsShard(s);
  }
  if (!options.use_hashtable) {
    present = Memory(static_cast<size_t>((options.max_capacity + 63) / 64) * 8, false);
    size = options.max_capacity;
  }
  if (options.policy.keeps_records()) records = std::make_unique<TableRecords>(options.policy);
}

// Two passes over a block, so that the cache misses of its keys overlap: ask for the buckets, then
// compare.
bool CpuTable::Impl::FindRange(const uint64_t* keys, int64_t num_keys, uint32_t* rows) const {
  int64_t num_missing = 0;
  if (!options.use_hashtable) {
    for (int64_t i = 0; i < num_keys; ++i) {
      const uint32_t row = DirectRow(keys[i]);
      rows[i] = IsPresent(row) ? row : kNoRow;
      num_missing += rows[i] == kNoRow;
    }
    return num_missing == 0;
  }
  const Index* indexes[kBlock];
  const Bucket* homes[kBlock];
  for (int64_t begin = 0; begin < num_keys; begin += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, num_keys - begin));
    for (int i = 0; i < n; ++i) {
      const uint64_t hash = HashKey(keys[begin + i]);
      indexes[i] = &shards[HashShard(hash)];
      homes[i] = indexes[i]->Home(hash);
      __builtin_prefetch(homes[i]);
    }
    for (int i = 0; i < n; ++i) {
      const uint32_t row = indexes[i]->FindFrom(homes[i], keys[begin + i]);
      rows[begin + i] = row;
      num_missing += row == kNoRow;
    }
  }
  return num_missing == 0;
}

bool CpuTable::Impl::FindRows(Executor& ex, const uint64_t* keys, int64_t num_keys,
                              uint32_t* rows) const {
  std::atomic<bool> all_found{true};
  ex.ParallelFor(num_keys, kReadGrain, [&](int64_t begin, int64_t end) {
    if (!FindRange(keys + begin, end - begin, rows + begin)) all_found = false;
  });
  return all_found;
}

void CpuTable::Impl::CopyOut(uint32_t row_number, bool pending, float* out) const {
  const float* const row = arena->Row(row_number);
  if (pending) {
    catch_up->Read(row, out);
  } else {
    ReadRow(row, out);
  }
}

void CpuTable::Impl::InitialEmbeddings(const uint64_t* keys, int64_t num_keys, double row_scale,
                                       float* const* rows) const {
  InitialRows(initializer, keys, num_keys, options.dim, rows);
  const float scale = static_cast<float>(row_scale);
  for (int64_t i = 0; scale != 1.0f && i < num_keys; ++i) {
    for (int64_t d = 0; d < options.dim; ++d) rows[i][d] *= scale;
  }
  for (int64_t i = 0; format.is_narrow() && i < num_keys; ++i) format.Round(rows[i]);
}

void CpuTable::Impl::ReadInitialRows(const uint64_t* keys, int64_t num_keys,
                                     float* const* rows) const {
  InitialEmbeddings(keys, num_keys, rows);
  if (!Pending()) return;
  std::vector<float> row(static_cast<size_t>(options.dim) + slot_initial.size());
  std::copy(slot_initial.begin(), slot_initial.end(), row.begin() + options.dim);
  for (int64_t i = 0; i < num_keys; ++i) {
    CopyFloats(rows[i], options.dim, row.data());
    catch_up->Read(row.data(), rows[i]);
  }
}

void CpuTable::Impl::ReadMissingRows(const uint64_t* keys, int64_t num_keys,
                                     float* const* rows) const {
  if (!options.policy.filters()) return ReadInitialRows(keys, num_keys, rows);
  for (int64_t i = 0; i < num_keys; ++i) {
    std::fill_n(rows[i], options.dim, options.policy.no_permission);
  }
}

int64_t CpuTable::Impl::ReadRange(const uint64_t* keys, int64_t num_keys, uint32_t* row_numbers,
                                  float* rows) const {
  const bool pending = Pending();
  const int64_t dim = options.dim;
  // To read a row that owes steps takes its slot rows too.
  const int64_t floats_read = format.embedding_floats() + (pending ? slot_floats() : 0);
  int64_t num_missing = 0;
  const auto copy_block = [&](int64_t begin, int64_t end) {
    uint64_t missing_keys[kBlock];
    float* missing_rows[kBlock];
    int n = 0;
    for (int64_t i = begin; i < end; ++i) {
      float* const out = rows + i * dim;
      if (row_numbers[i] != kNoRow) {
        CopyOut(row_numbers[i], pending, out);
      } else {
        missing_keys[n] = keys[i];
        missing_rows[n++] = out;
      }
    }
    if (n > 0) ReadMissingRows(missing_keys, n, missing_rows);
    num_missing += n;
  };
  // The rows of a block are on their way while the next block is looked up.
  int64_t copied = 0;
  for (int64_t begin = 0; begin < num_keys; begin += kBlock) {
    const int64_t end = std::min(num_keys, begin + kBlock);
    FindRange(keys + begin, end - begin, row_numbers + begin);
    for (int64_t i = begin; i < end; ++i) {
      if (row_numbers[i] != kNoRow) PrefetchRow<false>(arena->Row(row_numbers[i]), floats_read);
    }
    if (begin > 0) copy_block(copied, begin);
    copied = begin;
  }
  if (num_keys > 0) copy_block(copied, num_keys);
  return num_missing;
}

CpuTable::CpuTable(const TableOptions& options, const CpuTable* sharing)
    : impl_(new Impl(options,
                     sharing != nullptr ? sharing->impl_->pool : std::make_shared<BlockPool>())) {
  InlineExecutor inline_executor;
  if (options.initial_capacity > 0) Reserve(inline_executor, options.initial_capacity);
}

CpuTable::~CpuTable() = default;

const TableOptions& CpuTable::options() const { return impl_->options; }
int64_t CpuTable::size() const { return impl_->size; }
int64_t CpuTable::Size(CallContext) const { return impl_->size; }
TableMutex& CpuTable::mutex() const { return impl_->mutex; }
float* CpuTable::Row(uint32_t row_number) const { return impl_->arena->Row(row_number); }

void CpuTable::Rows(const uint32_t* row_numbers, int64_t num_rows, const float** rows) const {
  const Arena& arena = *impl_->arena;
  for (int64_t i = 0; i < num_rows; ++i) rows[i] = arena.Row(row_numbers[i]);
}

void CpuTable::ReadRow(uint32_t row_number, float* row) const {
  impl_->CopyOut(row_number, impl_->Pending(), row);
}

const RowFormat& CpuTable::format() const { return impl_->format; }

void CpuTable::InitialRow(uint64_t key, float* row) const { impl_->ReadInitialRows(&key, 1, &row); }

void CpuTable::MissingRow(uint64_t key, float* row) const { impl_->ReadMissingRows(&key, 1, &row); }

void CpuTable::Find(CallContext context, const uint64_t* keys, int64_t num_keys, float* rows,
                    uint8_t* found) const {
  const SharedLock lock(impl_->mutex);
  Read(context.threads(), keys, num_keys, rows, found);
}

void CpuTable::WriteZeros(CallContext, float* rows, int64_t num_rows) const {
  std::fill_n(rows, num_rows * dim(), 0.0f);
}

void CpuTable::Read(Executor& ex, const uint64_t* keys, int64_t num_keys, float* rows,
                    uint8_t* found) const {
  const bool direct = !impl_->options.use_hashtable;  // every row is there from the start
  BringKeys(ex, keys, num_keys, /*writes=*/false);
  ex.ParallelFor(num_keys, kReadGrain, [&](int64_t begin, int64_t end) {
    uint32_t row_numbers[1024];
    for (int64_t b = begin; b < end; b += 1024) {
      const int64_t n = std::min<int64_t>(1024, end - b);
      impl_->ReadRange(keys + b, n, row_numbers, rows + b * dim());
      if (found == nullptr) continue;
      for (int64_t i = 0; i < n; ++i) found[b + i] = direct || row_numbers[i] != kNoRow;
    }
  });
}

int64_t CpuTable::Impl::ReadBatch(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                  uint32_t* row_numbers, float* rows) const {
  std::atomic<int64_t> num_missing{0};
  if (arena->is_on_disk()) {
    FindRows(ex, keys, num_keys, row_numbers);
    arena->Bring(ex, row_numbers, num_keys, RowUse::kWrite);
  }
  ex.ParallelFor(num_keys, kReadGrain, [&](int64_t begin, int64_t end) {
    num_missing +=
        ReadRange(keys + begin, end - begin, row_numbers + begin, rows + begin * options.dim);
  });
  return num_missing;
}

void CpuTable::Impl::InsertRead(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                uint32_t* row_numbers, uint8_t* inserted, const float* rows) {
  Insertion insertion(keys, num_keys, row_numbers);
  insertion.inserted = inserted;
  insertion.given = Pending() ? nullptr : rows;
  InsertMissing(ex, &insertion);
}

void CpuTable::FindOrInsert(CallContext context, const uint64_t* keys, int64_t num_keys,
                            float* rows, uint8_t* inserted) {
  Executor& ex = context.threads();
  CheckBatch(num_keys, impl_->options);
  const Scratch<uint32_t> row_numbers(num_keys);
  if (inserted != nullptr) std::fill_n(inserted, num_keys, 0);
  if (impl_->records != nullptr) return RecordAndRead(ex, keys, num_keys, rows, inserted);
  uint64_t version;
  {
    // Most batches of a trained table have no new key: those need no more than this.
    const SharedLock lock(impl_->mutex);
    version = impl_->version;
    if (impl_->ReadBatch(ex, keys, num_keys, row_numbers.get(), rows) == 0) return;
  }
  const ExclusiveLock lock(impl_->mutex);
  if (impl_->version != version) {  // another thread inserted, erased or rebased meanwhile
    if (impl_->ReadBatch(ex, keys, num_keys, row_numbers.get(), rows) == 0) return;
  }
  impl_->InsertRead(ex, keys, num_keys, row_numbers.get(), inserted, rows);
}

bool CpuTable::Impl::FindUnlessNew(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                   uint32_t* rows) const {
  // Every key takes a row number until it is found, so there must be enough for all. Rows on disk
  // are found before they are written, so that they can be fetched in one go.
  const int64_t most = options.max_capacity > 0 ? options.max_capacity : int64_t{kNoRow};
  constexpr int64_t kSample = 64;
  if (!arena->is_on_disk() && options.use_hashtable && num_keys >= 16 * kSample &&
      size + num_keys <= most && next_row + num_keys <= int64_t{kNoRow}) {
    uint64_t sample[kSample];
    uint32_t sample_rows[kSample];
    for (int64_t i = 0; i < kSample; ++i) sample[i] = keys[i * (num_keys / kSample)];
    FindRange(sample, kSample, sample_rows);
    if (std::count(sample_rows, sample_rows + kSample, kNoRow) >= kSample - 2) {
      std::fill_n(rows, num_keys, kNoRow);
      return false;
    }
  }
  const bool all_found = FindRows(ex, keys, num_keys, rows);
  arena->Bring(ex, rows, num_keys, RowUse::kWrite);
  return all_found;
}

void CpuTable::BringRows(Executor& ex, const uint32_t* row_numbers, int64_t num_rows,
                         bool writes) const {
  impl_->arena->Bring(ex, row_numbers, num_rows, writes ? RowUse::kWrite : RowUse::kRead);
}

void CpuTable::BringKeys(Executor& ex, const uint64_t* keys, int64_t num_keys, bool writes) const {
  if (!impl_->arena->is_on_disk()) return;
  const Scratch<uint32_t> row_numbers(num_keys);
  FindRows(ex, keys, num_keys, row_numbers.get());
  BringRows(ex, row_numbers.get(), num_keys, writes);
}

void CpuTable::FindRows(Executor& ex, const uint64_t* keys, int64_t num_keys,
                        uint32_t* row_numbers) const {
  impl_->FindRows(ex, keys, num_keys, row_numbers);
}

void CpuTable::RememberRows(Executor& ex, const uint64_t* keys, int64_t num_keys,
                            Scratch<uint32_t> row_numbers) noexcept {
  Impl::Remembered& remembered = impl_->remembered;
  try {
    remembered = {num_keys, Scratch<uint64_t>(num_keys), std::move(row_numbers), impl_->version};
    ex.ParallelFor(num_keys, kCopyGrain, [&](int64_t begin, int64_t end) {
      std::copy(keys + begin, keys + end, remembered.keys.get() + begin);
    });
  } catch (const std::bad_alloc&) {
    remembered = Impl::Remembered();
  }
}

Scratch<uint32_t> CpuTable::RecallRows(Executor& ex, const uint64_t* keys, int64_t num_keys) {
  Impl::Remembered& remembered = impl_->remembered;
  if (!remembered.rows || remembered.version != impl_->version || num_keys != remembered.num_keys) {
    return {};
  }
  std::atomic<bool> all_equal{true};
  ex.ParallelFor(num_keys, kCopyGrain, [&](int64_t begin, int64_t end) {
    if (!std::equal(keys + begin, keys + end, remembered.keys.get() + begin)) all_equal = false;
  });
  if (!all_equal) return {};
  return std::exchange(remembered, Impl::Remembered()).rows;
}

void CpuTable::FindOrInsertRows(Executor& ex, const uint64_t* keys, int64_t num_keys,
                                uint32_t* row_numbers, bool keys_are_unique) {
  CheckBatch(num_keys, impl_->options);
  if (impl_->FindUnlessNew(ex, keys, num_keys, row_numbers)) return;
  Insertion insertion(keys, num_keys, row_numbers);
  insertion.keys_are_unique = keys_are_unique;
  impl_->InsertMissing(ex, &insertion);
  if (impl_->records != nullptr) impl_->RecordWritten(insertion);
}

void CpuTable::Assign(CallContext context, const uint64_t* keys, int64_t num_keys,
                      const float* rows) {
  Executor& ex = context.threads();
  CheckBatch(num_keys, impl_->options);
  impl_->RequireRowsFit(keys, rows, num_keys);
  const Scratch<uint32_t> row_numbers(num_keys);
  const ExclusiveLock lock(impl_->mutex);
  impl_->FindUnlessNew(ex, keys, num_keys, row_numbers.get());
  // What is there already, by shard: equal keys are written by one thread, in order, so the last
  // wins. New keys are grouped, and written, as they are inserted.
  ShardGroups present;
  const int64_t num_missing = std::count(row_numbers.get(), row_numbers.get() + num_keys, kNoRow);
  const bool direct = !impl_->options.use_hashtable;  // there a new row is a present key's
  const bool may_exceed = impl_->options.policy.evicts_by_score();
  if (num_missing < num_keys || direct) {
    GroupByShard(
        ex, keys, num_keys, [&](int64_t i) { return direct || row_numbers[i] != kNoRow; },
        &present);
  }
  if (num_missing > 0) {
    Insertion insertion(keys, num_keys, row_numbers.get());
    insertion.given = direct ? nullptr : rows;
    insertion.may_exceed = may_exceed;
    impl_->InsertMissing(ex, &insertion);
    if (impl_->records != nullptr) impl_->RecordWritten(insertion);
  }
  impl_->Touch(ex, keys, row_numbers.get(), num_keys);
  ex.ParallelFor(kNumShards, ShardGrain(present.total()), [&](int64_t begin, int64_t end) {
    for (int64_t i = present.offsets[begin]; i < present.offsets[end]; ++i) {
      const int64_t position = present.positions[i];
      impl_->WriteGivenRow(rows + position * dim(), /*is_new=*/false, row_numbers[position]);
    }
  });
  if (may_exceed) surplus_ += impl_->EvictSurplus(ex);
}

int64_t CpuTable::Erase(CallContext context, const uint64_t* keys, int64_t num_keys) {
  CheckBatch(num_keys, impl_->options);
  RequireHashtable(impl_->options);
  Executor& ex = context.threads();
  const ExclusiveLock lock(impl_->mutex);
  ShardGroups groups;
  GroupByShard(ex, keys, num_keys, [](int64_t) { return true; }, &groups);
  std::vector<uint32_t> erased(static_cast<size_t>(num_keys), kNoRow);
  std::vector<uint32_t>& free_rows = impl_->free_rows;
  const size_t most = free_rows.size() + static_cast<size_t>(std::min(num_keys, size()));
  if (most > free_rows.capacity()) free_rows.reserve(std::max(most, 2 * free_rows.capacity()));
  TableRecords* const records = impl_->records.get();
  AdmissionFilter* const filter = records != nullptr ? records->filter.get() : nullptr;
  if (records != nullptr) records->statistics.dropped += records->buffer.Forget(keys, num_keys);
  std::atomic<int64_t> num_forgotten{0};
  ++impl_->version;
  ex.ParallelFor(kNumShards, ShardGrain(num_keys), [&](int64_t begin, int64_t end) {
    int64_t forgotten = 0;
    for (int64_t i = groups.offsets[begin]; i < groups.offsets[end]; ++i) {
      const uint64_t key = keys[groups.positions[i]];
      const uint64_t hash = HashKey(key);
      erased[i] = impl_->shards[HashShard(hash)].Erase(hash, key);
      if (filter != nullptr) forgotten += filter->Forget(hash, key);
    }
    num_forgotten += forgotten;
  });
  int64_t num_erased = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t row = erased[i];
    if (row == kNoRow) continue;
    impl_->Leave(keys[groups.positions[i]], row);
    free_rows.push_back(row);
    if (records != nullptr) records->Remove(row);
    ++num_erased;
  }
  impl_->size -= num_erased;
  if (records != nullptr) records->statistics.erased += num_erased;
  return num_erased + num_forgotten;
}

void CpuTable::Clear(CallContext context) {
  const ExclusiveLock lock(impl_->mutex);
  impl_->Clear(context.threads());
}

void CpuTable::Reserve(CallContext context, int64_t num_keys) {
  const ExclusiveLock lock(impl_->mutex);
  const int64_t max_capacity = impl_->options.max_capacity;
  if (max_capacity > 0 && num_keys > max_capacity) {
    throw std::length_error("Reserve must not exceed max_capacity=" + std::to_string(max_capacity) +
                            ". Received: " + std::to_string(num_keys) + " (table '" +
                            impl_->options.name + "')");
  }
  if (impl_->options.use_hashtable) impl_->ReserveIndex(context.threads(), num_keys);
}

MemoryStats CpuTable::Stats(CallContext) const {
  const SharedLock lock(impl_->mutex);
  const Impl& impl = *impl_;
  MemoryStats stats;
  stats.size = impl.size;
  stats.max_capacity = impl.options.max_capacity;
  int64_t total_probes = 0;
  for (const Index& shard : impl.shards) {
    stats.capacity += shard.capacity();
    stats.num_buckets += shard.num_buckets();
    stats.index_bytes += shard.bytes();
    shard.AddProbeLengths(&total_probes, &stats.max_probe_length);
  }
  stats.index_bytes += impl.pool->idle_bytes();
  if (impl.options.use_hashtable) {
    const int64_t num_slots = stats.num_buckets * Bucket::kSlots;
    if (num_slots > 0) stats.load_factor = static_cast<double>(stats.size) / num_slots;
    if (stats.size > 0) stats.mean_probe_length = static_cast<double>(total_probes) / stats.size;
  } else {
    stats.capacity = stats.size;
    stats.load_factor = 1.0;
    stats.index_bytes = static_cast<int64_t>(impl.present.bytes());
  }
  stats.arena_bytes = impl.arena->bytes();
  if (impl.arena->is_on_disk()) {
    stats.storage = impl.arena->storage_stats();
    stats.arena_bytes = stats.storage.resident_bytes;
  } else if (impl.options.use_hashtable && impl.arena->num_chunks() == 1) {
    // The pages of chunk 0 are committed as rows are written.
    stats.arena_bytes = std::min(stats.arena_bytes, impl.next_row * impl.arena->stride() * 4);
  }
  stats.bytes =
      stats.index_bytes + stats.arena_bytes + static_cast<int64_t>(sizeof(Impl)) +
      static_cast<int64_t>(impl.free_rows.capacity() * sizeof(uint32_t)) +
      impl.remembered.num_keys * static_cast<int64_t>(sizeof(uint64_t) + sizeof(uint32_t)) +
      static_cast<int64_t>(impl.options.initializer.default_rows.size() * sizeof(float)) +
      (impl.records != nullptr ? impl.records->bytes() : 0) +
      (impl.changes != nullptr ? impl.changes->bytes() : 0) +
      (impl.instant != nullptr ? impl.instant->bytes() : 0) +
      (impl.room != nullptr ? impl.room->bytes() : 0) +
      (impl.catch_up != nullptr ? impl.catch_up->bytes() : 0);
  return stats;
}

}  // namespace sok
