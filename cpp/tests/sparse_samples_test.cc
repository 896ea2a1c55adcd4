#include "cpp/core/cpu/sparse_samples.h"

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

using Entry = std::pair<int64_t, int64_t>;

// Rows 0 to batch - 1; every 7th has no entry.
std::vector<Entry> Entries(int64_t num_entries, int64_t batch) {
  std::mt19937 generator(num_entries);
  std::vector<Entry> entries;
  while (static_cast<int64_t>(entries.size()) < num_entries) {
    const int64_t row = generator() % batch;
    if (row % 7 != 0) entries.emplace_back(row, generator() % 5);
  }
  return entries;
}

void Check(const std::vector<Entry>& entries, int64_t batch) {
  std::vector<int64_t> indices, expected_order(entries.size()), expected_splits;
  for (const Entry& entry : entries) {
    indices.push_back(entry.first);
    indices.push_back(entry.second);
  }
  for (size_t k = 0; k < entries.size(); ++k) expected_order[k] = k;
  std::stable_sort(expected_order.begin(), expected_order.end(),
                   [&](int64_t a, int64_t b) { return entries[a] < entries[b]; });
  if (std::is_sorted(entries.begin(), entries.end())) expected_order.clear();
  for (int64_t row = 0; row <= batch; ++row) {
    expected_splits.push_back(std::count_if(entries.begin(), entries.end(),
                                            [row](const Entry& e) { return e.first < row; }));
  }
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    std::vector<int64_t> splits(batch + 1, -1);
    const auto order = SparseSamples(pool, indices.data(), entries.size(), batch, splits.data());
    CHECK(order == expected_order);
    CHECK(splits == expected_splits);
  }
}

void TestOrders() {
  for (int64_t num_entries : {0, 1, 500, 100000}) {
    for (int64_t batch : {1, 8, 1000}) {
      if (batch == 1 && num_entries > 0) continue;  // row 0 has no entry
      std::vector<Entry> entries = Entries(num_entries, batch);
      Check(entries, batch);
      std::sort(entries.begin(), entries.end());
      Check(entries, batch);
      if (num_entries < 2) continue;
      std::swap(entries[num_entries / 2], entries[num_entries / 2 - 1]);
      Check(entries, batch);
    }
  }
  Check({}, 0);
}

// What is outside of the rows shows at the ends of the splits, and writes nothing beside them.
void TestRowsOutside() {
  Check({{-3, 0}, {0, 0}, {2, 0}}, 3);
  Check({{0, 0}, {2, 0}, {3, 0}}, 3);
  Check({{9, 0}, {-9, 0}, {int64_t{1} << 62, 0}}, 3);
  Check({{0, 0}}, 0);
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestOrders();
  sok::TestRowsOutside();
  return 0;
}
