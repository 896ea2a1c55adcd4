// Slots and import: the calls that see every row.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

#include "cpp/core/cpu/table_impl.h"

namespace sok {

// Brings rows up in the order in which they lie on disk; in the order of keys each block would be
// visited as often as it has rows.
void CpuTable::Impl::CatchUpInOrder(Executor& ex) {
  std::vector<bool> is_used(static_cast<size_t>(next_row));
  for (const Index& shard : shards) {
    shard.ForEach([&is_used](uint64_t, uint32_t row) { is_used[row] = true; });
  }
  ForEachRange(ex, next_row, RowUse::kScanWrite, [&](int64_t first, int64_t last) {
    ex.ParallelFor(last - first, 1024, [&](int64_t begin, int64_t end) {
      for (int64_t r = first + begin; r < first + end; ++r) {
        if (is_used[r]) catch_up->Apply(arena->Row(static_cast<uint32_t>(r)));
      }
    });
  });
}

void CpuTable::Impl::CatchUpAll(Executor& ex) {
  if (catch_up == nullptr) return;
  if (catch_up->pending()) {
    TouchAll(ex, /*logs=*/false);  // readers of deltas replay the steps
    if (arena->is_on_disk()) {
      CatchUpInOrder(ex);
    } else {
      ex.ParallelFor(kNumShards, 1, [&](int64_t begin, int64_t end) {
        for (int64_t s = begin; s < end; ++s) {
          shards[s].ForEach([this](uint64_t, uint32_t row) { catch_up->Apply(arena->Row(row)); });
        }
      });
    }
    if (!options.use_hashtable) {
      // A row that was never written owes as much as the others. Once the history is forgotten,
      // only a materialised row can hold the effect.
      const int64_t num_rows = options.max_capacity;
      for (int64_t row = 0; row < num_rows; ++row) arena->ReserveRow(static_cast<uint32_t>(row));
      ForEachRange(ex, num_rows, RowUse::kScanWrite, [&](int64_t first, int64_t last) {
        ex.ParallelFor(last - first, 1024, [&](int64_t begin, int64_t end) {
          for (int64_t r = first + begin; r < first + end; ++r) {
            const uint32_t row = static_cast<uint32_t>(r);
            const uint64_t key = direct.KeyOf(static_cast<uint64_t>(r));
            if (!IsPresent(row)) WriteInitialRows(&key, &row, 1);
            catch_up->Apply(arena->Row(row));
          }
        });
      });
      std::memset(present.data(), 0xFF, present.bytes());
    }
  }
  ++version;
  if (changes != nullptr && catch_up->pending()) changes->CaughtUp();
  ForgetSteps();
}

void CpuTable::Impl::ForgetSteps() {
  if (catch_up == nullptr) return;
  initial_row_scale *= catch_up->Decay();
  catch_up->Rebase();
}

double CpuTable::Impl::InitialRowScale() const {
  return catch_up == nullptr ? initial_row_scale : initial_row_scale * catch_up->Decay();
}

double CpuTable::InitialRowScale(CallContext) const {
  const SharedLock lock(impl_->mutex);
  return impl_->InitialRowScale();
}

void CpuTable::CatchUpRows(Executor& ex) { impl_->CatchUpAll(ex); }

ChangeLog* CpuTable::changes() const { return impl_->changes.get(); }

void CpuTable::Touch(Executor& ex, const uint64_t* keys, const uint32_t* row_numbers,
                     int64_t num_keys) noexcept {
  impl_->Touch(ex, keys, row_numbers, num_keys);
}

int64_t CpuTable::row_bytes() const {
  return impl_->next_row * impl_->arena->stride() * static_cast<int64_t>(sizeof(float));
}

const std::vector<SlotVariableSpec>& CpuTable::slots() const { return impl_->slots; }

int64_t CpuTable::SlotOffset(const std::string& name) const {
  const int64_t offset = OffsetOfSlot(impl_->slots, format().embedding_floats(), name);
  if (offset >= 0) return offset;
  throw std::out_of_range("Table '" + options().name + "' has no slot variable '" + name + "'");
}

StepNumber& CpuTable::step_number() const { return impl_->step_number; }

void CpuTable::AttachCatchUp(std::shared_ptr<RowCatchUp> catch_up) {
  ++impl_->version;
  ChangeLog* const changes = impl_->changes.get();
  // Steps of two optimizers in one delta could not be told apart.
  if (changes != nullptr && changes->has_steps()) changes->TouchAll();
  impl_->catch_up = std::move(catch_up);
}

const std::shared_ptr<RowCatchUp>& CpuTable::catch_up() const { return impl_->catch_up; }

std::vector<SlotVariableSpec> CpuTable::Slots() const {
  const SharedLock lock(impl_->mutex);
  return impl_->slots;
}

void CpuTable::ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) {
  const ExclusiveLock lock(impl_->mutex);
  LayOutSlots(context.threads(), specs);
}

void CpuTable::LayOutSlots(Executor& ex, const std::vector<SlotVariableSpec>& specs, bool keeps) {
  Impl& impl = *impl_;
  if (SameSlots(specs, impl.slots)) return;
  CheckSlots(specs, impl.options.name);
  impl.TouchAll(ex, /*logs=*/false);
  std::vector<float> slot_initial;
  for (const SlotVariableSpec& spec : specs)
    slot_initial.insert(slot_initial.end(), spec.width, spec.initial);
  std::vector<SlotVariableSpec> new_slots = specs;
  const int64_t embedding_floats = impl.format.embedding_floats();
  auto arena = std::make_unique<Arena>(embedding_floats + static_cast<int64_t>(slot_initial.size()),
                                       impl.options.storage, impl.options.name, impl.pool.get());

  // A catch-up knows the old offsets: rows must not owe anything when an offset changes.
  bool offsets_stay = true;
  for (const SlotVariableSpec& spec : impl.slots) {
    offsets_stay &=
        OffsetOfSlot(specs, embedding_floats, spec.name, spec.width) == SlotOffset(spec.name);
  }
  if (!offsets_stay) impl.CatchUpAll(ex);

  // All new chunks first: mapped, not yet committed. Nothing can fail once rows are being moved.
  // Old chunks are freed on the way, so at most one chunk exists twice.
  Arena& old = *impl.arena;
  const int64_t num_rows =
      std::min(impl.options.use_hashtable ? impl.next_row : impl.options.max_capacity,
               old.num_chunks() * old.chunk_rows());
  for (int64_t first = 0; first < num_rows;
       first += std::min(old.chunk_rows(), arena->chunk_rows())) {
    if (old.HasRow(static_cast<uint32_t>(first))) arena->ReserveRow(static_cast<uint32_t>(first));
  }
  const std::vector<KeptSlot> kept =
      KeptSlots(keeps ? impl.slots : std::vector<SlotVariableSpec>(), specs, embedding_floats);
  std::atomic<bool> learnt{false};  // rows got an initial value that was not known before
  std::exception_ptr disk_error;
  int64_t first = 0;  // first row of the chunk being moved
  const std::function<void(int64_t, int64_t)> move_rows = [&](int64_t begin, int64_t end) {
    for (int64_t r = first + begin; r < first + end; ++r) {
      const float* const from = old.Row(static_cast<uint32_t>(r));
      float* const to = arena->Row(static_cast<uint32_t>(r));
      std::memcpy(to, from, static_cast<size_t>(embedding_floats) * sizeof(float));
      float* slot = to + embedding_floats;
      std::copy(slot_initial.begin(), slot_initial.end(), slot);
      for (size_t s = 0; s < specs.size(); slot += specs[s++].width) {
        if (kept[s].offset < 0) continue;
        const float* const old_slot = from + kept[s].offset;
        for (int64_t k = 0; k < specs[s].width; ++k) {
          if (!kept[s].may_be_unknown || !std::isnan(old_slot[k])) {
            slot[k] = old_slot[k];
          } else {
            learnt = true;
          }
        }
      }
    }
  };
  for (int64_t chunk = 0; chunk * old.chunk_rows() < num_rows; ++chunk) {
    first = chunk * old.chunk_rows();
    if (!old.HasRow(static_cast<uint32_t>(first))) continue;
    const int64_t count = std::min(old.chunk_rows(), num_rows - first);
    try {
      old.BringRange(ex, first, count, RowUse::kScan);
      arena->BringRange(ex, first, count, RowUse::kScanWrite);
    } catch (...) {  // a disk error; the rows are moved nevertheless
      if (!disk_error) disk_error = std::current_exception();
    }
    ex.ParallelFor(count, 1024, move_rows);
    old.FreeChunk(chunk);
  }
  if (impl.changes != nullptr &&
      (learnt || !offsets_stay || !SameSavedSlots(impl.slots, new_slots))) {
    impl.changes->TouchAll();
  }
  impl.arena = std::move(arena);
  impl.slots = std::move(new_slots);
  impl.slot_initial = std::move(slot_initial);
  if (!offsets_stay) impl.catch_up = nullptr;
  if (disk_error) std::rethrow_exception(disk_error);
}

void CpuTable::Impl::RequireRowsFit(const uint64_t* keys, const float* rows,
                                    int64_t num_keys) const {
  if (!format.is_narrow() || format.Holds(rows, num_keys * options.dim)) return;
  int64_t i = 0;
  while (format.Holds(rows + i * options.dim, options.dim)) ++i;
  throw std::invalid_argument(
      "Rows must be within the range of " + std::string(RowTypeName(options.row_type)) +
      ". Received: the row of key " + std::to_string(static_cast<int64_t>(keys[i])) +
      ", which would become infinite (table '" + options.name + "')");
}

// Rows whose memory is asked for before they are copied, so that cache misses overlap.
constexpr int64_t kAhead = 16;

void CpuTable::Impl::CopyRange(const uint64_t* keys, const float* const* from, int64_t num_keys,
                               const RowLayout& layout, float* rows, float* slot_rows) const {
  TableSnapshot named;
  NameSavedSlots(layout.slots, &named);
  const int64_t width = named.slot_width(), dim = options.dim;
  for (int64_t i = 0; i < num_keys; ++i) {
    if (i + kAhead < num_keys && from[i + kAhead] != nullptr) {
      __builtin_prefetch(from[i + kAhead]);
    }
    float* const to = rows == nullptr ? nullptr : rows + i * dim;
    if (from[i] != nullptr && to != nullptr) ReadRow(from[i], to);
    if (from[i] == nullptr && to != nullptr) {
      InitialEmbeddings(keys + i, 1, layout.initial_row_scale, &to);
    }
    if (slot_rows == nullptr) continue;
    const float* const slot_row =
        from[i] == nullptr ? layout.slot_initial.data() : from[i] + format.embedding_floats();
    CopySavedSlots(layout.slots, slot_row, slot_rows + i * width);
  }
}

void CpuTable::Impl::CopyRows(Executor& ex, const uint64_t* keys, const uint32_t* row_numbers,
                              int64_t num_keys, float* rows, float* slot_rows) const {
  const RowLayout layout = Layout();
  TableSnapshot named;
  NameSavedSlots(slots, &named);
  const auto copy = [&](int64_t begin, int64_t end) {
    std::vector<const float*> from;
    for (int64_t i = begin; i < end; ++i) {
      from.push_back(row_numbers[i] == kNoRow ? nullptr : arena->Row(row_numbers[i]));
    }
    CopyRange(keys + begin, from.data(), end - begin, layout,
              rows == nullptr ? nullptr : rows + begin * options.dim,
              slot_rows == nullptr ? nullptr : slot_rows + begin * named.slot_width());
  };
  ForEachPart(ex, row_numbers, num_keys, RowUse::kScan, [&](int64_t first, int64_t last) {
    ex.ParallelFor(last - first, 1024,
                   [&](int64_t begin, int64_t end) { copy(first + begin, first + end); });
  });
}

void CpuTable::Import(CallContext context, const TableSnapshot& snapshot, bool replace) {
  if (replace) {
    const std::unique_ptr<Table> aside = MakeAside(context);
    aside->Import(context, snapshot);
    return TakeContent(context, *aside);
  }
  Executor& ex = context.threads();
  Impl& impl = *impl_;
  CheckSnapshot(snapshot, impl.options);
  if (snapshot.keys.size() >= size_t{kNoRow}) {
    throw std::invalid_argument("A snapshot must have at most 2^32 - 2 keys. Received: " +
                                std::to_string(snapshot.keys.size()) + " (table '" +
                                impl.options.name + "')");
  }
  impl.RequireRowsFit(snapshot.keys.data(), snapshot.rows.data(),
                      static_cast<int64_t>(snapshot.keys.size()));
  const size_t num_keys = snapshot.keys.size();
  const int64_t width = snapshot.slot_width();
  const ExclusiveLock lock(impl.mutex);
  if (impl.records != nullptr && impl.records->filter != nullptr) {
    impl.records->filter->CheckCounters(snapshot.policy.counters);
  }
  const std::vector<SlotVariableSpec> specs =
      SlotsWithThoseOf(snapshot, impl.slots, impl.SlotsOwner(), impl.options);
  // Unsaved slots of imported rows get their initial value, which means "up to date" only once
  // the history is forgotten.
  impl.CatchUpAll(ex);
  LayOutSlots(ex, specs);
  std::vector<int64_t> offsets;
  impl.imported_slots.clear();
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    offsets.push_back(SlotOffset(snapshot.slot_names[s]));
    impl.imported_slots.push_back({snapshot.slot_names[s], snapshot.slot_widths[s], 0.0f, true});
  }
  const int64_t n = static_cast<int64_t>(num_keys);
  const uint64_t* const keys = snapshot.keys.data();
  std::vector<uint32_t> row_numbers(num_keys);
  impl.FindUnlessNew(ex, keys, n, row_numbers.data());
  // Of keys that are all new to a hash table, the rows are written while they are inserted.
  const bool is_new =
      impl.options.use_hashtable && std::count(row_numbers.begin(), row_numbers.end(), kNoRow) == n;
  ShardGroups groups;  // by shard, as in Assign: of equal keys the last wins
  if (!is_new) GroupByShard(ex, keys, n, [](int64_t) { return true; }, &groups);
  const auto write_slots = [&](int64_t position) {
    float* const row = Row(row_numbers[position]);
    const float* slot_row = snapshot.slot_rows.data() + position * width;
    for (size_t s = 0; s < offsets.size(); ++s) {
      for (int64_t k = 0; k < snapshot.slot_widths[s]; ++k, ++slot_row) {
        if (!std::isnan(*slot_row)) row[offsets[s] + k] = *slot_row;  // else the initial value
      }
    }
  };
  const std::function<void(int64_t, int64_t)> write = [&](int64_t begin, int64_t end) {
    for (int64_t i = groups.offsets[begin]; i < groups.offsets[end]; ++i) {
      const int64_t position = groups.positions[i];
      float* const row = Row(row_numbers[position]);
      impl.WriteRow(snapshot.rows.data() + position * dim(), row);
      std::copy(impl.slot_initial.begin(), impl.slot_initial.end(),
                row + impl.format.embedding_floats());
      write_slots(position);
    }
  };
  const std::function<void(int64_t, int64_t)> write_in_order = [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) write_slots(position);
  };
  Insertion insertion(keys, n, row_numbers.data());
  if (is_new) insertion.given = snapshot.rows.data();
  insertion.may_exceed = impl.options.policy.evicts_by_score();
  const int64_t size_before = impl.size;
  impl.InsertMissing(ex, &insertion);  // the last call that may fail
  impl.Touch(ex, keys, row_numbers.data(), n);
  if (impl.records != nullptr) impl.RecordWritten(insertion);
  if (!is_new || impl.size - size_before < n) {
    if (is_new)
      groups = std::move(insertion.repeats.total() > 0 ? insertion.repeats : insertion.misses);
    ex.ParallelFor(kNumShards, ShardGrain(n), write);
  } else if (width > 0) {
    ex.ParallelFor(n, 1024, write_in_order);
  }
  if (impl.records != nullptr) impl.ImportRecords(snapshot, row_numbers.data());
  if (insertion.may_exceed) surplus_ += impl.EvictSurplus(ex);
  if (snapshot.optimizer_step >= 0) impl.step_number.ResumeFrom(snapshot.optimizer_step);
  if (snapshot.initial_row_scale >= 0.0) impl.initial_row_scale = snapshot.initial_row_scale;
}

}  // namespace sok
