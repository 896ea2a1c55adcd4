#include "cpp/core/cpu/plain_array.h"

#include <cstdint>

#include "cpp/tests/check.h"

namespace sok {
namespace {

struct Value {
  int64_t number = -1;
  uint64_t other[2] = {7, 7};
};

// From a few bytes of the heap to pages that the system moves.
void KeepsItsValuesWhileItGrows() {
  PlainArray<Value> array;
  CHECK_EQ(array.bytes(), 0);
  for (int64_t n = 0; n < 200000; ++n) {
    array.Reserve(n + 1);
    array.Push({n, {1, 2}});
  }
  CHECK_EQ(array.size(), 200000);
  CHECK(array.bytes() >= 200000 * 24 && array.bytes() <= 300000 * 24 + 4096);
  array.Pop();
  array.Resize(500000);
  for (int64_t n = 0; n < 500000; ++n) {
    CHECK_EQ(array[n].number, n < 199999 ? n : -1);
    CHECK_EQ(array[n].other[1], n < 199999 ? 2u : 7u);
  }
  CHECK_EQ(array.end() - array.begin(), 500000);
  array.Clear();
  CHECK_EQ(array.bytes(), 0);
  array.Resize(3);
  CHECK_EQ(array[2].number, -1);
}

}  // namespace
}  // namespace sok

int main() { sok::KeepsItsValuesWhileItGrows(); }
