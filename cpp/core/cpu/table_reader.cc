// Reads all of a table, or what changed, in parts, to write a dump.
//
//     keys        the kListed smallest that are greater than those before, sorted: one pass over
//                 the index per kListed keys
//     rows        found by the keys, as in a lookup
//
// So memory does not grow with the table: 12 bytes for each of 2 * kListed keys. The reader holds
// the table's lock, shared, from the first part to the last.
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kListed = 4 << 20;

// Radix sort, one byte at a time from the lowest; skips bytes that all keys share.
void Sort(std::vector<uint64_t>* keys) {
  const int64_t n = static_cast<int64_t>(keys->size());
  // Not a Scratch, whose memory would be kept.
  const std::unique_ptr<uint64_t[]> scratch(new uint64_t[n]);
  uint64_t *from = keys->data(), *to = scratch.get();
  for (int shift = 0; shift < 64; shift += 8) {
    int64_t places[257] = {};
    for (int64_t i = 0; i < n; ++i) ++places[(from[i] >> shift & 255) + 1];
    if (std::find(places, places + 257, n) != places + 257) continue;
    for (int i = 0; i < 256; ++i) places[i + 1] += places[i];
    for (int64_t i = 0; i < n; ++i) to[places[from[i] >> shift & 255]++] = from[i];
    std::swap(from, to);
  }
  if (from != keys->data()) std::copy_n(from, n, keys->data());
}

}  // namespace

class CpuTable::Reader final : public TableReader {
 public:
  // Releases the table's lock in the end; the caller makes it a shared one when nothing can fail
  // any more. `about` lacks the snapshot. `given`: the keys to read, unless `is_whole`.
  Reader(const CpuTable& table, TableChanges about, std::vector<uint64_t> given, bool is_whole,
         bool with_slots)
      : table_(table),
        about_(std::move(about)),
        listed_(std::move(given)),
        num_keys_(is_whole ? table.size() : static_cast<int64_t>(listed_.size())) {
    const Impl& impl = *table.impl_;
    TableSnapshot& snapshot = about_.snapshot;
    snapshot.initial_row_scale = impl.InitialRowScale();
    if (with_slots) {
      NameSavedSlots(impl.slots, &snapshot);
      snapshot.optimizer_step = impl.step_number.last();
    }
    if (impl.records == nullptr) return;
    snapshot.policy.step = impl.records->step;
    if (impl.records->filter == nullptr) return;
    snapshot.policy.waiting = impl.records->filter->ExportKeys();
    snapshot.policy.counters = impl.records->filter->ExportCounters();
  }
  ~Reader() override { table_.mutex().Release(); }

  const TableChanges& about() const override { return about_; }
  int64_t num_keys() const override { return num_keys_; }

  void ReadKeys(CallContext, int64_t num_keys, uint64_t* keys) override {
    while (num_keys > 0) {
      if (next_ == listed_.size()) ListMore();
      const int64_t n = std::min(num_keys, static_cast<int64_t>(listed_.size() - next_));
      keys = std::copy_n(listed_.begin() + next_, n, keys);
      next_ += n;
      num_keys -= n;
      num_read_ += n;
    }
    if (num_read_ == num_keys_) std::vector<uint64_t>().swap(listed_);
  }

  void ReadRows(CallContext context, int64_t, const uint64_t* keys, int64_t num_keys, float* rows,
                float* slot_rows, int64_t* records) const override {
    const Impl& impl = *table_.impl_;
    const Scratch<uint32_t> row_numbers(num_keys);
    table_.FindRows(context.threads(), keys, num_keys, row_numbers.get());
    if (rows != nullptr || slot_rows != nullptr) {
      impl.CopyRows(context.threads(), keys, row_numbers.get(), num_keys, rows, slot_rows);
    }
    if (records != nullptr) impl.CopyRecords(row_numbers.get(), num_keys, records);
  }

 private:
  // Lists the next keys in listed_; there must be some.
  void ListMore() {
    const Impl& impl = *table_.impl_;
    const int64_t left = num_keys_ - num_read_;
    const uint64_t before = listed_.empty() ? 0 : listed_.back();
    listed_.clear();
    next_ = 0;
    if (!impl.options.use_hashtable) {
      for (int64_t row = num_read_; row < num_read_ + std::min(left, kListed); ++row) {
        listed_.push_back(impl.direct.KeyOf(static_cast<uint64_t>(row)));
      }
      return;
    }
    listed_.reserve(std::min(left, 2 * kListed));
    uint64_t most = std::numeric_limits<uint64_t>::max();
    for (const Index& shard : impl.shards) {
      shard.ForEach([&](uint64_t key, uint32_t) {
        if ((num_read_ > 0 && key <= before) || key > most) return;
        listed_.push_back(key);
        if (listed_.size() == 2 * kListed) most = KeepSmallest();
      });
    }
    if (listed_.size() > static_cast<size_t>(kListed)) KeepSmallest();
    Sort(&listed_);
  }

  uint64_t KeepSmallest() {
    std::nth_element(listed_.begin(), listed_.begin() + (kListed - 1), listed_.end());
    listed_.resize(kListed);
    return listed_.back();
  }

  const CpuTable& table_;
  TableChanges about_;
  std::vector<uint64_t> listed_;  // ascending
  size_t next_ = 0;               // in listed_
  const int64_t num_keys_;
  int64_t num_read_ = 0;
};

std::unique_ptr<TableReader> CpuTable::OpenContent(CallContext context, bool with_slots,
                                                   bool evict) {
  Executor& ex = context.threads();
  ExclusiveLock lock(impl_->mutex);
  if (evict && impl_->options.policy.evicts_on_call()) impl_->Evict(ex);
  impl_->CatchUpAll(ex);
  auto reader =
      std::make_unique<Reader>(*this, TableChanges(), std::vector<uint64_t>(), true, with_slots);
  lock.release()->Hold();
  return reader;
}

std::unique_ptr<TableReader> CpuTable::OpenChanges(CallContext context, int64_t since) {
  Executor& ex = context.threads();
  ExclusiveLock lock(impl_->mutex);
  TableChanges about;
  std::vector<uint64_t> touched = impl_->BeginChanges(ex, since, &about);
  const bool is_whole = about.whole;
  auto reader = std::make_unique<Reader>(*this, std::move(about), std::move(touched), is_whole,
                                         /*with_slots=*/true);
  lock.release()->Hold();
  return reader;
}

}  // namespace sok
