// Reads all of a table, or what changed, in parts, to write a dump.
//
//     keys        in ranges of about kRangeKeys, bounded by keys of a sample. One walk over the index
//                 lists the keys of the next ranges, at least kListed or a quarter of all; then each
//                 range is sorted by one thread
//     rows        by the row numbers that the walk has found with the keys
//
// So there are at most four walks beyond kListed keys, and memory is 12 bytes per key listed: 3
// bytes per key of a large table. The reader holds the table's lock, shared, from the first part to
// the last. Beside writers it takes it for a few buckets or rows at a time, works on its own thread
// alone and rests in between, and has an Instant, which knows the rows that have changed meanwhile.
#include <algorithm>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpp/core/cpu/scratch.h"
#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kListed = 8 << 20, kWalks = 4;
constexpr int64_t kRangeKeys = 1 << 19;
constexpr int64_t kSampled = 64;  // keys per range: ranges then differ by an eighth or so in size
// Read at a time beside writers. They wait for half a millisecond.
constexpr int64_t kRowsBeside = 4096, kBucketsBeside = 8192;

struct Range {
  std::vector<uint64_t> keys;
  std::vector<uint32_t> rows;

  void Add(const uint64_t* new_keys, const uint32_t* new_rows, int64_t n) {
    keys.insert(keys.end(), new_keys, new_keys + n);
    rows.insert(rows.end(), new_rows, new_rows + n);
  }
};

// Radix sort, one byte at a time from the lowest; skips bytes that all keys share. Calls between()
// after each byte.
void Sort(Range* range, FunctionRef<> between) {
  const int64_t n = static_cast<int64_t>(range->keys.size());
  std::vector<int64_t> counts(8 * 256);
  for (uint64_t key : range->keys) {
    for (int b = 0; b < 8; ++b) ++counts[b * 256 + (key >> (8 * b) & 255)];
  }
  // Not a Scratch, whose memory would be kept.
  const std::unique_ptr<uint64_t[]> other_keys(new uint64_t[n]);
  const std::unique_ptr<uint32_t[]> other_rows(new uint32_t[n]);
  uint64_t *keys = range->keys.data(), *to_keys = other_keys.get();
  uint32_t *rows = range->rows.data(), *to_rows = other_rows.get();
  for (int b = 0; b < 8; ++b) {
    int64_t* const places = &counts[b * 256];
    if (std::find(places, places + 256, n) != places + 256) continue;
    int64_t place = 0;
    for (int i = 0; i < 256; ++i) place += std::exchange(places[i], place);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t to = places[keys[i] >> (8 * b) & 255]++;
      to_keys[to] = keys[i];
      to_rows[to] = rows[i];
    }
    std::swap(keys, to_keys);
    std::swap(rows, to_rows);
    between();
  }
  if (keys == range->keys.data()) return;
  std::copy_n(keys, n, range->keys.data());
  std::copy_n(rows, n, range->rows.data());
}

// Leaves each key once.
void DropRepeats(Range* range) {
  size_t n = 0;
  for (size_t i = 0; i < range->keys.size(); ++i) {
    if (n > 0 && range->keys[i] == range->keys[n - 1]) continue;
    range->keys[n] = range->keys[i];
    range->rows[n++] = range->rows[i];
  }
  range->keys.resize(n);
  range->rows.resize(n);
}

}  // namespace

class CpuTable::Reader final : public TableReader {
 public:
  // Releases the table's lock in the end, unless it reads `beside` writers; the caller makes it a
  // shared one when nothing can fail any more. `about` lacks the snapshot. `keys`: those to read,
  // unless `is_whole`.
  Reader(const CpuTable& table, TableChanges about, std::vector<uint64_t> keys, bool is_whole,
         bool with_slots, bool beside = false)
      : table_(table),
        about_(std::move(about)),
        listed_{std::move(keys), {}},
        num_keys_(is_whole ? table.size() : static_cast<int64_t>(listed_.keys.size())) {
    Impl& impl = *table.impl_;
    TableSnapshot& snapshot = about_.snapshot;
    snapshot.initial_row_scale = impl.InitialRowScale();
    if (with_slots) {
      NameSavedSlots(impl.slots, &snapshot);
      snapshot.optimizer_step = impl.step_number.last();
    }
    if (impl.records != nullptr) {
      snapshot.policy.step = impl.records->step;
      if (impl.records->filter != nullptr) {
        if (!beside) snapshot.policy.waiting = impl.records->filter->ExportKeys();
        snapshot.policy.counters = impl.records->filter->ExportCounters();
      }
    }
    if (!beside) return;
    if (impl.options.use_hashtable) ChooseBounds();
    instant_ = std::make_unique<Instant>(impl);
    if (impl.records != nullptr && impl.records->filter != nullptr) {
      waiting_ = impl.records->filter->BeginInstant();
    }
    impl.instant = instant_.get();
  }
  ~Reader() override {
    Impl& impl = *table_.impl_;
    if (instant_ == nullptr) {
      impl.mutex.Release();
      return;
    }
    {
      const SharedLock lock(impl.mutex);
      instant_->Stop();  // else a writer might wait for this reader
    }
    {
      const ExclusiveLock lock(impl.mutex);
      impl.instant = nullptr;
      if (waiting_ != nullptr && !waiting_->is_whole()) impl.records->filter->DropInstant();
    }
    std::unique_ptr<Instant::Room> room = instant_->Leave();  // frees memory: without the lock
    const ExclusiveLock lock(impl.mutex);
    impl.room.swap(room);
  }

  const TableChanges& about() const override { return about_; }
  void ReadWaiting() override {
    if (waiting_ == nullptr) return;
    for (bool is_whole = false; !is_whole; Rest()) {
      const SharedLock lock(table_.impl_->mutex);
      if (!waiting_->is_whole()) table_.impl_->records->filter->ReadInstant();
      is_whole = waiting_->is_whole();
    }
    about_.snapshot.policy.waiting = waiting_->Take();
    waiting_ = nullptr;
  }
  int64_t num_keys() const override { return num_keys_; }
  void Hurry() override { pace_.Hurry(); }

  void ReadKeys(CallContext context, int64_t num_keys, uint64_t* keys) override {
    part_first_ = num_read_;
    part_rows_.clear();
    for (int64_t left = num_keys; left > 0;) {
      if (place_ == listed_.keys.size()) ListMore(context.threads());
      const int64_t n = std::min(left, static_cast<int64_t>(listed_.keys.size() - place_));
      keys = std::copy_n(listed_.keys.begin() + place_, n, keys);
      if (!listed_.rows.empty()) {
        const auto rows = listed_.rows.begin() + place_;
        part_rows_.insert(part_rows_.end(), rows, rows + n);
      }
      place_ += n;
      num_read_ += n;
      left -= n;
    }
    if (num_read_ == num_keys_) {
      listed_ = Range();
      place_ = 0;
      ranges_.clear();
    }
  }

  void ReadRows(CallContext context, int64_t first, const uint64_t* keys, int64_t num_keys,
                float* rows, float* slot_rows, int64_t* records) const override {
    if (instant_ != nullptr) return ReadBeside(keys, num_keys, rows, slot_rows, records);
    const Impl& impl = *table_.impl_;
    const bool is_part =  // which ReadKeys has read last
        first == part_first_ && num_keys == static_cast<int64_t>(part_rows_.size());
    const Scratch<uint32_t> found(is_part ? 0 : num_keys);
    if (!is_part) table_.FindRows(context.threads(), keys, num_keys, found.get());
    const uint32_t* const row_numbers = is_part ? part_rows_.data() : found.get();
    if (rows != nullptr || slot_rows != nullptr) {
      impl.CopyRows(context.threads(), keys, row_numbers, num_keys, rows, slot_rows);
    }
    if (records != nullptr) impl.CopyRecords(row_numbers, num_keys, records);
  }

 private:
  void ReadBeside(const uint64_t* keys, int64_t num_keys, float* rows, float* slot_rows,
                  int64_t* records) const {
    const int64_t dim = table_.dim(), width = about_.snapshot.slot_width();
    for (int64_t first = 0; first < num_keys; first += kRowsBeside) {
      SharedLock lock(table_.impl_->mutex);
      instant_->Read(keys + first, part_rows_.data() + first,
                     std::min(kRowsBeside, num_keys - first),
                     rows == nullptr ? nullptr : rows + first * dim,
                     slot_rows == nullptr ? nullptr : slot_rows + first * width,
                     records == nullptr ? nullptr : records + 3 * first);
      lock.unlock();
      Rest();
    }
  }

  void Rest() const {
    pace_.Rest([] { return Instant::OfAll(); });
  }

  // Makes listed_ the next range; there must be some.
  void ListMore(Executor& ex) {
    const Impl& impl = *table_.impl_;
    place_ = 0;
    if (!impl.options.use_hashtable) {
      const int64_t end = std::min(num_keys_, num_read_ + kRangeKeys);
      listed_ = Range();
      for (int64_t row = num_read_; row < end; ++row) {
        listed_.keys.push_back(impl.direct.KeyOf(static_cast<uint64_t>(row)));
        if (instant_ != nullptr) listed_.rows.push_back(static_cast<uint32_t>(row));
      }
      return;
    }
    do {  // a range may be empty
      InlineExecutor alone;
      if (ranges_.empty()) Walk(instant_ == nullptr ? ex : alone);
      listed_ = std::move(ranges_.back());
      ranges_.pop_back();
      if (instant_ == nullptr) continue;
      Sort(&listed_, [this] { Rest(); });
      DropRepeats(&listed_);
    } while (listed_.keys.empty());
  }

  // Lists the keys of the next ranges, in reverse order; sorts them unless it reads beside writers.
  void Walk(Executor& ex) {
    const Impl& impl = *table_.impl_;
    const Instant* const instant = instant_.get();
    if (num_ranges_ == 0) ChooseBounds();
    const int64_t at_once = std::max(kListed, (num_keys_ + kWalks - 1) / kWalks) / kRangeKeys;
    const int64_t num = std::min(at_once, num_ranges_ - num_walked_);
    if (num == 0) throw std::logic_error("A table lost keys of the instant that is read");
    const uint64_t* const bounds = bounds_.data() + num_walked_;  // the last keys of these ranges
    const bool has_before = num_walked_ > 0;
    const uint64_t before = has_before ? bounds[-1] : 0, last = bounds[num - 1];
    ranges_.resize(static_cast<size_t>(num));
    const std::unique_ptr<std::mutex[]> mutexes(new std::mutex[num]);
    ex.ParallelFor(kNumShards, 1, [&](int64_t begin, int64_t end) {
      struct Few {
        int64_t n = 0;
        uint64_t keys[64];
        uint32_t rows[64];
      };
      std::vector<Few> few(static_cast<size_t>(num));
      const auto flush = [&](int64_t range) {
        const std::lock_guard<std::mutex> lock(mutexes[range]);
        ranges_[num - 1 - range].Add(few[range].keys, few[range].rows, few[range].n);
        few[range].n = 0;
      };
      const auto add = [&](uint64_t key, uint32_t row) {
        if ((has_before && key <= before) || key > last) return;
        int64_t range = 0;  // by halves, without branches to mispredict
        for (int64_t n = num; n > 1; n -= n / 2) {
          range += bounds[range + n / 2 - 1] < key ? n / 2 : 0;
        }
        Few& to = few[range];
        to.keys[to.n] = key;
        to.rows[to.n] = row;
        if (++to.n == 64) flush(range);
      };
      for (int64_t s = begin; s < end; ++s) {
        if (instant == nullptr) {
          impl.shards[s].ForEach(add);
          continue;
        }
        WalkBeside(impl.shards[s], add);
      }
      if (instant != nullptr) {  // a row that was copied since it was listed comes twice
        const SharedLock lock(impl.mutex);
        instant->CheckSaved();
        instant->ForEachCopy(add);
      }
      for (int64_t range = 0; range < num; ++range) flush(range);
    });
    num_walked_ += num;
    if (instant != nullptr) return;  // each is sorted when its turn comes: rows are read earlier
    ex.ParallelFor(num, 1, [&](int64_t begin, int64_t end) {
      for (int64_t range = begin; range < end; ++range) Sort(&ranges_[range], [] {});
    });
  }

  // The keys of rows that have not changed; a key may come twice. If keys have moved since it has
  // released the lock, it begins again.
  template <typename Fn>
  void WalkBeside(const Index& shard, const Fn& add) const {
    uint64_t layout = 0;
    for (int64_t begin = 0, num = 1; begin < num;) {
      SharedLock lock(table_.impl_->mutex);
      if (shard.layout() != std::exchange(layout, shard.layout())) begin = 0;
      num = shard.num_buckets();
      const int64_t end = std::min(num, begin + kBucketsBeside);
      shard.ForEachIn(begin, end, [&](uint64_t key, uint32_t row) {
        if (instant_->IsHere(row)) add(key, row);
      });
      begin = end;
      lock.unlock();
      Rest();
    }
  }

  void ChooseBounds() {
    num_ranges_ = (num_keys_ + kRangeKeys - 1) / kRangeKeys;
    std::vector<uint64_t> sample;
    if (num_ranges_ > 1) {
      // Shard and slot of a key depend on its hash, so some shards are as good as a sample of all.
      const int64_t wanted = num_ranges_ * kSampled;
      for (const Index& shard : table_.impl_->shards) {
        const int64_t stride = shard.size() / wanted + 1;
        int64_t n = 0;
        shard.ForEach([&](uint64_t key, uint32_t) {
          if (n++ % stride == 0) sample.push_back(key);
        });
        if (static_cast<int64_t>(sample.size()) >= wanted) break;
      }
      std::sort(sample.begin(), sample.end());
    }
    const int64_t size = static_cast<int64_t>(sample.size());
    for (int64_t range = 1; range < num_ranges_; ++range) {
      bounds_.push_back(sample[size * range / num_ranges_]);
    }
    bounds_.push_back(std::numeric_limits<uint64_t>::max());
  }

  const CpuTable& table_;
  TableChanges about_;
  Range listed_;                  // the next keys, ascending; their rows unless they must be found
  size_t place_ = 0;              // in listed_
  std::vector<Range> ranges_;     // after listed_, the next one at the end
  std::vector<uint64_t> bounds_;  // the last key of each range
  int64_t num_ranges_ = 0, num_walked_ = 0;
  std::vector<uint32_t> part_rows_;  // row numbers of the keys that were read last, if known
  int64_t part_first_ = 0;
  const int64_t num_keys_;
  int64_t num_read_ = 0;
  std::shared_ptr<WaitingInstant> waiting_;  // beside writers, until ReadWaiting
  std::unique_ptr<Instant> instant_;         // null unless it reads beside writers
  mutable Pace pace_;                        // beside writers
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

std::unique_ptr<TableReader> CpuTable::OpenChanges(CallContext context, int64_t since,
                                                   bool beside) {
  Executor& ex = context.threads();
  ExclusiveLock lock(impl_->mutex);
  if (beside && (since != 0 || impl_->instant != nullptr)) {
    throw std::invalid_argument(
        "Only a full dump can be read beside writers, and one at a time. Received: " +
        (since != 0 ? "since=" + std::to_string(since) : std::string("a second one")) +
        " (table '" + options().name + "')");
  }
  TableChanges about;
  ChangeLog::Interval interval = impl_->BeginChanges(ex, since, &about);
  const bool is_whole = about.whole;
  if (!is_whole) impl_->ListChanges(ex, &interval, &about.erased);
  auto reader = std::make_unique<Reader>(*this, std::move(about), std::move(interval.touched),
                                         is_whole, /*with_slots=*/true, beside);
  if (!beside) lock.release()->Hold();
  return reader;
}

}  // namespace sok
