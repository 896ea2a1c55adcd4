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

}  // namespace

CpuTable::Instant::Instant(Impl& impl)
    : impl_(impl),
      layout_(impl.Layout()),
      num_rows_(impl.options.use_hashtable ? impl.next_row : impl.options.max_capacity),
      row_floats_(impl.format.embedding_floats() + impl.slot_floats()),
      places_(static_cast<size_t>(num_rows_) * sizeof(uint32_t), /*huge=*/num_rows_ >> 20 > 0),
      copies_(row_floats_, impl.options.storage, impl.options.name) {
  const int64_t row_bytes = copies_.stride() * static_cast<int64_t>(sizeof(float));
  limit_ = std::max(num_rows_ / 4, kLeastLimit / row_bytes);
}

uint32_t CpuTable::Instant::NewCopy(uint64_t key, uint32_t row) {
  uint32_t copy;
  if (free_.empty()) {
    copy = static_cast<uint32_t>(keys_.size());
    keys_.push_back(key);
    rows_.push_back(row);
    if (impl_.records != nullptr) records_.resize(3 * keys_.size());
  } else {
    copy = free_.back();
    free_.pop_back();
    keys_[copy] = key;
    rows_[copy] = row;
  }
  place(row) = kCopies + copy;
  return copy;
}

void CpuTable::Instant::Copy(Executor& ex, const uint64_t* keys, const uint32_t* rows,
                             int64_t num_keys) {
  fresh_.clear();
  for (int64_t i = 0; i < num_keys; ++i) {
    if (!IsHere(rows[i])) continue;
    if (!impl_.options.use_hashtable && !impl_.IsPresent(rows[i])) {
      place(rows[i]) = kInitial;
    } else {
      fresh_.push_back({rows[i], NewCopy(keys[i], rows[i])});
    }
  }
  const int64_t num_fresh = static_cast<int64_t>(fresh_.size());
  if (num_fresh == 0) return;
  copies_.Reserve(static_cast<int64_t>(keys_.size()));
  if (copies_.is_on_disk()) {
    std::vector<uint32_t> from, to;
    for (const Fresh& fresh : fresh_) {
      from.push_back(fresh.row);
      to.push_back(fresh.copy);
    }
    impl_.arena->Bring(ex, from.data(), num_fresh, RowUse::kScan);
    copies_.Bring(ex, to.data(), num_fresh, RowUse::kScanWrite);
  }
  ex.ParallelFor(num_fresh, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Fresh ahead = fresh_[std::min(i + kAhead, end - 1)], fresh = fresh_[i];
      PrefetchRow<false>(impl_.arena->Row(ahead.row), row_floats_);
      std::copy_n(impl_.arena->Row(fresh.row), row_floats_, copies_.Row(fresh.copy));
      if (!records_.empty()) impl_.CopyRecords(&fresh.row, 1, &records_[3 * fresh.copy]);
    }
  });
  Throttle();
}

void CpuTable::Instant::Save(Executor& ex, const uint64_t* keys, const uint32_t* rows,
                             int64_t num_keys) noexcept {
  if (stopped_) return;
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
  InlineExecutor alone;
  std::vector<uint32_t> here, copied;
  const Scratch<const float*> from(num_keys);
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t at = place(rows[i]);
    if (at >= kCopies) {
      copied.push_back(at - kCopies);
      from[i] = copies_.Row(at - kCopies);
    } else if (at == kHere && (impl_.options.use_hashtable || impl_.IsPresent(rows[i]))) {
      here.push_back(rows[i]);
      from[i] = impl_.arena->Row(rows[i]);
    } else {
      from[i] = nullptr;
    }
  }
  impl_.arena->Bring(alone, here.data(), static_cast<int64_t>(here.size()), RowUse::kScan);
  copies_.Bring(alone, copied.data(), static_cast<int64_t>(copied.size()), RowUse::kScan);
  impl_.CopyRange(keys, from.get(), num_keys, layout_, embeddings, slot_rows);
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t at = std::exchange(place(rows[i]), kRead);
    if (records != nullptr && at >= kCopies) {
      std::copy_n(&records_[3 * (at - kCopies)], 3, records + 3 * i);
    } else if (records != nullptr) {
      impl_.CopyRecords(&rows[i], 1, records + 3 * i);
    }
  }
  free_.insert(free_.end(), copied.begin(), copied.end());
  Throttle();
}

void CpuTable::Instant::Throttle() noexcept {
  const int64_t waiting = static_cast<int64_t>(keys_.size() - free_.size());
  if (!throttles_ && waiting > limit_) {
    impl_.mutex.SetCrowded(throttles_ = true);
  } else if (throttles_ && (stopped_ || waiting <= limit_ / 2)) {
    impl_.mutex.SetCrowded(throttles_ = false);
  }
}

void CpuTable::Instant::Stop() noexcept {
  stopped_ = true;
  if (throttles_) Throttle();
}

int64_t CpuTable::Instant::bytes() const {
  // Without free_, which the reader may be changing; it is no larger than rows_.
  return static_cast<int64_t>(places_.bytes() + keys_.capacity() * sizeof(uint64_t) +
                              2 * rows_.capacity() * sizeof(uint32_t) +
                              records_.capacity() * sizeof(int64_t)) +
         (copies_.is_on_disk() ? copies_.storage_stats().resident_bytes : copies_.bytes());
}

}  // namespace sok
