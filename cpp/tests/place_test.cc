#include <vector>

#include "cpp/core/cpu/route.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

// Every row of a table, placed; what it should be follows from dealing rows out one rank at a time.
void TestByRows(int64_t num_rows, int64_t world_size) {
  InlineExecutor ex;
  std::vector<int64_t> ids(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) ids[i] = i;
  std::vector<uint64_t> keys(num_rows);
  PlaceRows(ex, {num_rows, -1, 0}, world_size, ids.data(), num_rows, keys.data());
  int64_t id = 0;
  for (int64_t owner = 0; owner < world_size; ++owner) {
    const int64_t rows = num_rows / world_size + (owner < num_rows % world_size ? 1 : 0);
    for (int64_t row = 0; row < rows; ++row, ++id) {
      CHECK_EQ(static_cast<int64_t>(keys[id] % world_size), owner);
      CHECK_EQ(static_cast<int64_t>(keys[id] / world_size), row);
    }
  }
  CHECK_EQ(id, num_rows);
}

void TestWholeTable() {
  InlineExecutor ex;
  const std::vector<int64_t> ids = {4, 0, 2, 4};
  std::vector<uint64_t> keys(ids.size());
  PlaceRows(ex, {5, 2, 100}, 3, ids.data(), ids.size(), keys.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    CHECK_EQ(keys[i] % 3, uint64_t{2});
    CHECK_EQ(static_cast<int64_t>(keys[i] / 3), ids[i] + 100);
  }
}

}  // namespace
}  // namespace sok

int main() {
  for (int64_t rows : {0, 1, 2, 7, 12, 1000}) {
    for (int64_t world_size : {1, 2, 3, 5, 16}) sok::TestByRows(rows, world_size);
  }
  sok::TestWholeTable();
  return 0;
}
