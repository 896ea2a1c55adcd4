#include "cpp/core/cpu/route.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

// Keys in a skewed mixture: a few hot ones, a wide tail, the extremes.
std::vector<uint64_t> SkewedKeys(int64_t num_keys, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<uint64_t> keys(num_keys);
  for (uint64_t& key : keys) {
    const uint64_t draw = generator();
    switch (draw % 4) {
      case 0:
        key = (draw >> 8) % 7;
        break;
      case 1:
        key = ~((draw >> 8) % 5);
        break;
      default:
        key = (draw >> 8) % (2 * num_keys + 1) * 0x9e3779b97f4a7c15ull;
    }
  }
  return keys;
}

struct Routed {
  std::vector<int32_t> inverse;
  std::vector<uint64_t> unique;
  std::vector<int64_t> owner_offsets;
};

Routed RouteKeys(Executor& ex, const std::vector<uint64_t>& keys, int64_t world_size) {
  Routed routed;
  routed.inverse.resize(keys.size());
  const Route route(ex, keys.data(), keys.size(), world_size, routed.inverse.data());
  routed.unique.resize(route.num_unique());
  route.WriteUnique(ex, routed.unique.data());
  routed.owner_offsets = route.owner_offsets();
  return routed;
}

void TestAgainstSet(int64_t num_keys, int64_t world_size) {
  ThreadPool pool(3);
  const std::vector<uint64_t> keys = SkewedKeys(num_keys, num_keys + world_size);
  const Routed routed = RouteKeys(pool, keys, world_size);
  const std::set<uint64_t> expected(keys.begin(), keys.end());
  CHECK_EQ(routed.unique.size(), expected.size());
  CHECK(std::set<uint64_t>(routed.unique.begin(), routed.unique.end()) == expected);
  for (int64_t i = 0; i < num_keys; ++i) CHECK_EQ(routed.unique[routed.inverse[i]], keys[i]);
  CHECK_EQ(static_cast<int64_t>(routed.owner_offsets.size()), world_size + 1);
  CHECK_EQ(routed.owner_offsets.front(), 0);
  CHECK_EQ(routed.owner_offsets.back(), static_cast<int64_t>(expected.size()));
  for (int64_t owner = 0; owner < world_size; ++owner) {
    for (int64_t u = routed.owner_offsets[owner]; u < routed.owner_offsets[owner + 1]; ++u) {
      CHECK_EQ(static_cast<int64_t>(routed.unique[u] % world_size), owner);
    }
  }
}

void TestThreadCountDoesNotShow(int64_t num_keys, int64_t world_size) {
  const std::vector<uint64_t> keys = SkewedKeys(num_keys, 7);
  InlineExecutor inline_executor;
  const Routed one = RouteKeys(inline_executor, keys, world_size);
  for (int num_threads : {2, 3, 5}) {
    ThreadPool pool(num_threads);
    const Routed many = RouteKeys(pool, keys, world_size);
    CHECK(many.unique == one.unique);
    CHECK(many.inverse == one.inverse);
    CHECK(many.owner_offsets == one.owner_offsets);
  }
}

void TestErrors() {
  InlineExecutor ex;
  int32_t inverse = 0;
  const uint64_t key = 5;
  CHECK_THROWS(Route(ex, &key, 1, 0, &inverse), std::invalid_argument, "`world_size`");
  CHECK_THROWS(Route(ex, &key, -1, 1, &inverse), std::invalid_argument, "Received: -1");
  CHECK_THROWS(Route(ex, &key, int64_t{1} << 31, 1, &inverse), std::invalid_argument, "2147483648");
}

}  // namespace
}  // namespace sok

int main() {
  for (int64_t num_keys : {0, 1, 2, 100, 4096, 4097, 50000, 300000}) {
    for (int64_t world_size : {1, 2, 3, 4, 7, 1000}) sok::TestAgainstSet(num_keys, world_size);
  }
  for (int64_t world_size : {1, 3, 8}) sok::TestThreadCountDoesNotShow(120000, world_size);
  sok::TestErrors();
  return 0;
}
