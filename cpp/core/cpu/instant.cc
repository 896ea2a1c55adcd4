#include "cpp/core/cpu/instant.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "cpp/core/cpu/table_impl.h"

namespace sok {
namespace {

constexpr int64_t kLeastLimit = int64_t{16} << 20;  // bytes of copies that may always wait
constexpr int64_t kRest = 4096;                     // rows that SaveRest saves at a time
constexpr int64_t kAhead = 12;                      // rows asked for before they are copied
constexpr int64_t kPlacesAhead = 24;                // the same of places

}  // namespace

CpuTable::Instant::Instant(Impl& impl)
    : impl_(impl),
      layout_(impl.Layout()),
      num_rows_(impl.options.use_hashtable ? impl.next_row : impl.options.max_capacity),
      row_floats_(impl.format.embedding_floats() + impl.slot_floats()) {
  Arena copies(row_floats_, impl.options.storage, impl.options.name);
  const int64_t row_bytes = copies.stride() * static_cast<int64_t>(sizeof(float));
  limit_ = std::max(num_rows_ / 2, kLeastLimit / row_bytes);
  if (impl.room != nullptr && impl.room->copies.stride() == copies.stride()) {
    room_ = std::move(impl.room);
  } else {
    impl.room = nullptr;
    room_.reset(new Room{Memory(), 1, std::move(copies), {}, {}, {}, {}});
  }
  // Growing would copy them while a step waits.
  const auto most = static_cast<size_t>(MostKept());
  room_->keys.reserve(most);
  room_->rows.reserve(most);
  room_->free.reserve(most);
  if (impl.records != nullptr) room_->records.reserve(3 * most);
  const size_t bytes = static_cast<size_t>(num_rows_) * sizeof(uint32_t);
  if (room_->places.bytes() < bytes || num_rows_ > int64_t{kNoRow} - kCopies - room_->first) {
    room_->places = Memory();
    room_->places = Memory(bytes + bytes / 8, /*huge=*/num_rows_ >> 20 > 0);
    room_->first = 1;
  }
  const std::lock_guard<std::mutex> lock(all_mutex_);
  all_.push_back(this);
}

CpuTable::Instant::~Instant() {
  const std::lock_guard<std::mutex> lock(all_mutex_);
  all_.erase(std::find(all_.begin(), all_.end(), this));
}

Demand CpuTable::Instant::OfAll() {
  Demand demand;
  demand.changes = changes_;
  const std::lock_guard<std::mutex> lock(all_mutex_);
  for (const Instant* each : all_) {
    const double part = static_cast<double>(each->waiting_) / static_cast<double>(each->limit_);
    demand.crowding = std::max(demand.crowding, part);
  }
  return demand;
}

uint32_t CpuTable::Instant::NewCopy(uint64_t key, uint32_t row) {
  Room& room = *room_;
  uint32_t copy;
  if (room.free.empty()) {
    copy = static_cast<uint32_t>(room.keys.size());
    room.keys.push_back(key);
    room.rows.push_back(row);
    if (impl_.records != nullptr) room.records.resize(3 * room.keys.size());
  } else {
    copy = room.free.back();
    room.free.pop_back();
    room.keys[copy] = key;
    room.rows[copy] = row;
  }
  place(row) = room.first + kCopies + copy;
  return copy;
}

void CpuTable::Instant::Copy(Executor& ex, const uint64_t* keys, const uint32_t* rows,
                             int64_t num_keys) {
  Room& room = *room_;
  fresh_.clear();
  for (int64_t i = 0; i < num_keys; ++i) {
    if (i + kPlacesAhead < num_keys && rows[i + kPlacesAhead] < num_rows_) {
      __builtin_prefetch(&place(rows[i + kPlacesAhead]), 1);
    }
    if (!IsHere(rows[i])) continue;
    if (!impl_.options.use_hashtable && !impl_.IsPresent(rows[i])) {
      place(rows[i]) = room.first + kInitial;
    } else {
      fresh_.push_back({rows[i], NewCopy(keys[i], rows[i])});
    }
  }
  const int64_t num_fresh = static_cast<int64_t>(fresh_.size());
  if (num_fresh == 0) return;
  room.copies.Reserve(static_cast<int64_t>(room.keys.size()));
  if (room.copies.is_on_disk()) {
    std::vector<uint32_t> from, to;
    for (const Fresh& fresh : fresh_) {
      from.push_back(fresh.row);
      to.push_back(fresh.copy);
    }
    impl_.arena->Bring(ex, from.data(), num_fresh, RowUse::kScan);
    room.copies.Bring(ex, to.data(), num_fresh, RowUse::kScanWrite);
  }
  ex.ParallelFor(num_fresh, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Fresh ahead = fresh_[std::min(i + kAhead, end - 1)], fresh = fresh_[i];
      PrefetchRow<false>(impl_.arena->Row(ahead.row), row_floats_);
      std::copy_n(impl_.arena->Row(fresh.row), row_floats_, room.copies.Row(fresh.copy));
      if (!room.records.empty()) {
        impl_.CopyRecords(&fresh.row, 1, &room.records[3 * size_t{fresh.copy}]);
      }
    }
  });
  Throttle();
}

void CpuTable::Instant::Save(Executor& ex, const uint64_t* keys, const uint32_t* rows,
                             int64_t num_keys) noexcept {
  if (stopped_) return;
  ++changes_;
  try {
    Copy(ex, keys, rows, num_keys);
  } catch (const std::exception& error) {
    problem_ = error.what();
    Stop();
  }
}

void CpuTable::Instant::SaveRest(Executor& ex) noexcept {
  const auto save = [&](auto&& for_each) {
    uint64_t keys[kRest];
    uint32_t rows[kRest];
    int64_t n = 0;
    for_each([&](uint64_t key, uint32_t row) {
      if (!IsHere(row)) return;
      keys[n] = key;
      rows[n] = row;
      if (++n == kRest) Save(ex, keys, rows, std::exchange(n, 0));
    });
    Save(ex, keys, rows, n);
  };
  if (impl_.options.use_hashtable) {
    for (const Index& shard : impl_.shards) save([&](const auto& fn) { shard.ForEach(fn); });
  } else {
    save([&](const auto& fn) {
      for (int64_t row = 0; row < num_rows_; ++row) {
        fn(impl_.direct.KeyOf(static_cast<uint64_t>(row)), static_cast<uint32_t>(row));
      }
    });
  }
  num_rows_ = 0;  // row numbers that were free may come into use in any way now
}

void CpuTable::Instant::CheckSaved() const {
  if (problem_.empty()) return;
  throw std::runtime_error("A row could not be copied before it changed: " + problem_ +
                           " (table '" + impl_.options.name + "')");
}

void CpuTable::Instant::Read(const uint64_t* keys, const uint32_t* rows, int64_t num_keys,
                             float* embeddings, float* slot_rows, int64_t* records) {
  CheckSaved();
  Room& room = *room_;
  const uint32_t first_copy = room.first + kCopies;
  InlineExecutor alone;
  std::vector<uint32_t> here, copied;
  const Scratch<const float*> from(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t at = place(rows[i]);
    if (at >= first_copy) {
      copied.push_back(at - first_copy);
      from[i] = room.copies.Row(at - first_copy);
    } else if (at < room.first && (impl_.options.use_hashtable || impl_.IsPresent(rows[i]))) {
      here.push_back(rows[i]);
      from[i] = impl_.arena->Row(rows[i]);
    } else {
      from[i] = nullptr;
    }
  }
  impl_.arena->Bring(alone, here.data(), static_cast<int64_t>(here.size()), RowUse::kScan);
  room.copies.Bring(alone, copied.data(), static_cast<int64_t>(copied.size()), RowUse::kScan);
  impl_.CopyRange(keys, from.get(), num_keys, layout_, embeddings, slot_rows);
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t at = std::exchange(place(rows[i]), room.first + kRead);
    if (records != nullptr && at >= first_copy) {
      std::copy_n(&room.records[3 * size_t{at - first_copy}], 3, records + 3 * i);
    } else if (records != nullptr) {
      impl_.CopyRecords(&rows[i], 1, records + 3 * i);
    }
  }
  room.free.insert(room.free.end(), copied.begin(), copied.end());
  Throttle();
}

void CpuTable::Instant::Throttle() noexcept {
  const int64_t waiting = static_cast<int64_t>(room_->keys.size() - room_->free.size());
  waiting_ = waiting;
  if (!throttles_ && waiting > limit_) {
    impl_.mutex.SetCrowded(throttles_ = true);
  } else if (throttles_ && (stopped_ || waiting <= limit_ - limit_ / 64)) {
    impl_.mutex.SetCrowded(throttles_ = false);
  }
}

void CpuTable::Instant::Stop() noexcept {
  stopped_ = true;
  if (throttles_) Throttle();
}

std::unique_ptr<CpuTable::Instant::Room> CpuTable::Instant::Leave() noexcept {
  Room& room = *room_;
  if (room.copies.is_on_disk()) return nullptr;
  room.first += kCopies + static_cast<uint32_t>(room.keys.size());
  const auto most = static_cast<size_t>(MostKept());
  const auto keep = [&](auto* vector, size_t size) {
    vector->clear();
    if (vector->capacity() > size) vector->shrink_to_fit();
  };
  keep(&room.keys, most);
  keep(&room.rows, most);
  keep(&room.records, 3 * most);
  keep(&room.free, most);
  room.copies.Keep(MostKept());
  return std::move(room_);
}

int64_t CpuTable::Instant::Room::bytes() const {
  // Without `free`, which the reader may be changing; it is no larger than `rows`.
  return static_cast<int64_t>(places.bytes() + keys.capacity() * sizeof(uint64_t) +
                              2 * rows.capacity() * sizeof(uint32_t) +
                              records.capacity() * sizeof(int64_t)) +
         (copies.is_on_disk() ? copies.storage_stats().resident_bytes : copies.bytes());
}

}  // namespace sok
