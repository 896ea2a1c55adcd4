#include "cpp/core/cpu/sparse_samples.h"

#include <algorithm>
#include <atomic>
#include <numeric>

namespace sok {
namespace {

constexpr int64_t kGrain = 16384;  // entries worth handing to another thread

bool IsAfter(const int64_t* a, const int64_t* b) {
  return a[0] > b[0] || (a[0] == b[0] && a[1] > b[1]);
}

// No early exit: usually all entries are in order.
bool AreInOrder(Executor& ex, const int64_t* indices, int64_t num_entries) {
  std::atomic<bool> in_order{true};
  ex.ParallelFor(num_entries, kGrain, [&](int64_t begin, int64_t end) {
    bool is_wrong = false;
    for (int64_t k = std::max<int64_t>(begin, 1); k < end; ++k) {
      const int64_t* const entry = indices + 2 * k;
      is_wrong |= (entry[-2] > entry[0]) | ((entry[-2] == entry[0]) & (entry[-1] > entry[1]));
    }
    if (is_wrong) in_order = false;
  });
  return in_order;
}

// Splits of entries that are in order. A range of entries writes the splits after the row of the
// entry before it, up to the row of its last entry.
template <typename RowOf>
void WriteSplits(Executor& ex, RowOf row_of, int64_t num_entries, int64_t batch,
                 int64_t* row_splits) {
  const auto next_after = [=](int64_t row) { return std::clamp<int64_t>(row, -1, batch) + 1; };
  ex.ParallelFor(num_entries, kGrain, [&](int64_t begin, int64_t end) {
    int64_t next = begin == 0 ? 0 : next_after(row_of(begin - 1));
    for (int64_t k = begin; k < end; ++k) {
      const int64_t row = std::min(row_of(k), batch);
      while (next <= row) row_splits[next++] = k;
    }
  });
  const int64_t written = num_entries == 0 ? 0 : next_after(row_of(num_entries - 1));
  if (written <= batch) std::fill(row_splits + written, row_splits + batch + 1, num_entries);
}

}  // namespace

std::vector<int64_t> SparseSamples(Executor& ex, const int64_t* indices, int64_t num_entries,
                                   int64_t batch, int64_t* row_splits) {
  std::vector<int64_t> order;
  if (AreInOrder(ex, indices, num_entries)) {
    WriteSplits(ex, [=](int64_t k) { return indices[2 * k]; }, num_entries, batch, row_splits);
    return order;
  }
  order.resize(static_cast<size_t>(num_entries));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [indices](int64_t a, int64_t b) {
    return IsAfter(indices + 2 * b, indices + 2 * a);
  });
  WriteSplits(ex, [&](int64_t k) { return indices[2 * order[k]]; }, num_entries, batch, row_splits);
  return order;
}

}  // namespace sok
