#include "cpp/core/cpu/group.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <numeric>

namespace sok {
namespace {

constexpr int64_t kKeysPerThread = 1024;  // enough to wake another thread for
constexpr int64_t kKeysPerWake = 4096;    // that a thread does while the passes of a table wake it

// Whether tables are done sooner side by side, one thread each, than one after the other, all threads
// each. Compares the keys of the thread with the most.
bool SideBySide(const std::vector<int64_t>& num_keys, int64_t num_threads) {
  const int64_t n = static_cast<int64_t>(num_keys.size());
  int64_t total = 0, largest = 0, in_turn = 0;
  for (int64_t count : num_keys) {
    const int64_t threads = std::clamp<int64_t>(count / kKeysPerThread, 1, num_threads);
    in_turn += count / threads + (threads > 1 ? kKeysPerWake : 0);
    total += count;
    largest = std::max(largest, count);
  }
  const int64_t rounds = (n + num_threads - 1) / num_threads;
  return n > 1 && std::max(largest, rounds * total / n) <= in_turn;
}

// The exception of the lowest item that threw one.
class FirstError {
 public:
  template <typename Fn>
  void Try(int64_t item, const Fn& fn) {
    try {
      fn();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (error_ && item_ < item) return;
      item_ = item;
      error_ = std::current_exception();
    }
  }
  void Rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  int64_t item_ = 0;
};

}  // namespace

void ForEachOf(Executor& ex, const std::vector<int64_t>& num_keys,
               FunctionRef<Executor&, int64_t> fn) {
  const int64_t n = static_cast<int64_t>(num_keys.size());
  FirstError error;
  const auto run = [&](Executor& inner, int64_t i) { error.Try(i, [&] { fn(inner, i); }); };
  if (!SideBySide(num_keys, ex.num_threads())) {
    for (int64_t i = 0; i < n; ++i) run(ex, i);
  } else {
    const int64_t total = std::accumulate(num_keys.begin(), num_keys.end(), int64_t{0});
    const int64_t grain = n * kKeysPerThread / std::max<int64_t>(1, total);
    ex.ParallelFor(n, std::clamp<int64_t>(grain, 1, n), [&](int64_t begin, int64_t end) {
      InlineExecutor inline_executor;
      for (int64_t i = begin; i < end; ++i) run(inline_executor, i);
    });
  }
  error.Rethrow();
}

TableGroup::TableGroup(const std::vector<CpuTable*>& tables)
    : by_address_(tables), order_(tables.size()) {
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(by_address_.begin(), by_address_.end(), std::less<>());
  const auto twice = std::adjacent_find(by_address_.begin(), by_address_.end());
  if (twice != by_address_.end()) repeated_ = *twice;
  by_address_.erase(std::unique(by_address_.begin(), by_address_.end()), by_address_.end());
  offsets_.resize(by_address_.size() + 1);
  if (repeated_ == nullptr) {
    std::iota(offsets_.begin(), offsets_.end(), 0);
    return;
  }
  // first[t]: the first member that names the table at by_address_[t].
  std::vector<int64_t> table_of(tables.size()), first(by_address_.size(), -1);
  for (size_t i = 0; i < tables.size(); ++i) {
    table_of[i] =
        std::lower_bound(by_address_.begin(), by_address_.end(), tables[i], std::less<>()) -
        by_address_.begin();
    if (first[table_of[i]] < 0) first[table_of[i]] = static_cast<int64_t>(i);
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int64_t a, int64_t b) { return first[table_of[a]] < first[table_of[b]]; });
  size_t table = 0;
  for (size_t i = 1; i <= order_.size(); ++i) {
    if (i < order_.size() && tables[order_[i]] == tables[order_[i - 1]]) continue;
    offsets_[++table] = static_cast<int64_t>(i);
  }
}

std::vector<int64_t> TableGroup::PerTable(const std::vector<int64_t>& num_keys) const {
  std::vector<int64_t> of_tables(by_address_.size());
  for (size_t t = 0; t < of_tables.size(); ++t) {
    for (int64_t k = offsets_[t]; k < offsets_[t + 1]; ++k) of_tables[t] += num_keys[order_[k]];
  }
  return of_tables;
}

void TableGroup::ForEach(Executor& ex, const std::vector<int64_t>& of_tables,
                         FunctionRef<Executor&, const int64_t*, int64_t> fn) const {
  ForEachOf(ex, of_tables, [&](Executor& inner, int64_t t) {
    fn(inner, &order_[offsets_[t]], offsets_[t + 1] - offsets_[t]);
  });
}

TableGroup::Lock::Lock(const TableGroup& group, bool exclusive)
    : tables_(group.by_address_), exclusive_(exclusive) {
  for (CpuTable* table : tables_) {
    if (exclusive) table->mutex().WaitForRoom();
  }
  for (CpuTable* table : tables_) {
    if (exclusive) {
      table->mutex().LockNow();
    } else {
      table->mutex().lock_shared();
    }
  }
}

TableGroup::Lock::~Lock() {
  for (CpuTable* table : tables_) {
    if (exclusive_) {
      table->mutex().unlock();
    } else {
      table->mutex().unlock_shared();
    }
  }
}

}  // namespace sok
