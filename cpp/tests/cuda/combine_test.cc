// Unique, combine and its gradient under the emulator: against plain loops, and the CPU's bits.
#include "cpp/core/cpu/combine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/core/cuda/table/table.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

void UniqueIsInOrderOfFirstOccurrence(int64_t num_keys, uint64_t num_different, int64_t world) {
  std::mt19937_64 random(num_keys + world);
  std::vector<uint64_t> keys(num_keys);
  for (uint64_t& key : keys) {
    key = random() % num_different;
    if (key % 5 == 0) key = ~key;  // sentinels of other tables
  }
  std::vector<std::vector<uint64_t>> expected(world);  // by owner
  std::map<uint64_t, int> seen;
  for (uint64_t key : keys) {
    if (seen[key]++ == 0) expected[key % world].push_back(key);
  }
  cuda::Workspace workspace;
  std::vector<uint64_t> unique(num_keys);
  std::vector<int32_t> inverse(num_keys);
  std::vector<int64_t> offsets(world + 1, -1);
  cuda::UniqueByOwner(kStream, workspace,
                      {{keys.data(), num_keys, unique.data(), inverse.data(), offsets.data()}},
                      world);
  int64_t place = 0;
  for (int64_t owner = 0; owner < world; ++owner) {
    CHECK_EQ(offsets[owner], place);
    for (uint64_t key : expected[owner]) CHECK_EQ(unique[place++], key);
  }
  CHECK_EQ(offsets[world], place);
  for (int64_t i = 0; i < num_keys; ++i) CHECK_EQ(unique[inverse[i]], keys[i]);

  std::vector<uint8_t> last(num_keys);
  cuda::ChooseOccurrence(kStream, workspace, keys.data(), num_keys, cuda::Occurrence::kLast,
                         last.data());
  std::map<uint64_t, int64_t> last_of;
  for (int64_t i = 0; i < num_keys; ++i) last_of[keys[i]] = i;
  for (int64_t i = 0; i < num_keys; ++i) CHECK_EQ(last[i], last_of[keys[i]] == i);
}

struct Case {
  std::vector<int32_t> inverse;
  std::vector<int64_t> row_splits;
  std::vector<float> weights;
  std::vector<float> rows;
  std::vector<float> grad;
  Samples samples;
};

Case RandomCase(Combiner combiner, bool weighted, int64_t num_keys, int64_t num_unique, int64_t dim,
                bool hot) {
  std::mt19937 random(num_keys + dim);
  std::normal_distribution<float> normal;
  Case c;
  for (int64_t k = 0; k < num_keys; ++k) {
    const bool is_hot = hot && random() % 2 == 0;  // half of the batch is one key
    c.inverse.push_back(is_hot ? 1 : static_cast<int32_t>(random() % num_unique));
    c.weights.push_back(random() % 8 == 0 ? 0.0f : normal(random));
  }
  c.row_splits = {0};
  while (c.row_splits.back() < num_keys) {
    const int64_t next = c.row_splits.back() + static_cast<int64_t>(random() % 9);
    c.row_splits.push_back(std::min(next, num_keys));
  }
  c.row_splits.push_back(num_keys);  // an empty sample at the end
  const int64_t batch = static_cast<int64_t>(c.row_splits.size()) - 1;
  const int64_t num_samples = combiner == Combiner::kNone ? num_keys : batch;
  c.rows.resize(num_unique * dim);
  c.grad.resize(num_samples * dim);
  for (float& x : c.rows) x = normal(random);
  for (float& x : c.grad) x = normal(random);
  c.samples.inverse = c.inverse.data();
  c.samples.num_keys = num_keys;
  c.samples.row_splits = combiner == Combiner::kNone ? nullptr : c.row_splits.data();
  c.samples.batch = combiner == Combiner::kNone ? 0 : batch;
  c.samples.weights = weighted ? c.weights.data() : nullptr;
  c.samples.combiner = combiner;
  return c;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void CombineHasTheBitsOfTheCpu(Combiner combiner, bool weighted, int64_t dim) {
  const int64_t num_unique = 37;
  const Case c = RandomCase(combiner, weighted, 211, num_unique, dim, false);
  InlineExecutor ex;
  std::vector<const float*> pointers;
  for (int64_t u = 0; u < num_unique; ++u) pointers.push_back(&c.rows[u * dim]);
  std::vector<float> expected(c.grad.size()), out(c.grad.size(), -1.0f);
  CombineRows(ex, c.samples, pointers.data(), num_unique, dim, expected.data());
  cuda::CombineRows(kStream, {{c.samples, c.rows.data(), dim, out.data()}});
  CHECK(SameBits(out, expected));

  TableOptions options;
  options.name = "t";
  options.dim = dim;
  cuda::CudaTable table(options);
  std::vector<uint64_t> keys(num_unique);
  for (int64_t u = 0; u < num_unique; ++u) keys[u] = u * 1000;
  std::vector<uint32_t> row_numbers(num_unique);
  table.Assign(kStream, keys.data(), num_unique, c.rows.data());
  table.FindRows(kStream, keys.data(), num_unique, row_numbers.data());
  std::fill(out.begin(), out.end(), -1.0f);
  cuda::CombineRows(kStream, {{c.samples, table.Ref(), row_numbers.data(), out.data()}});
  CHECK(SameBits(out, expected));

  const std::vector<float> zeros(dim, 0.0f);
  row_numbers[5] = kNoRow;
  pointers[5] = zeros.data();
  CombineRows(ex, c.samples, pointers.data(), num_unique, dim, expected.data());
  cuda::CombineRows(kStream, {{c.samples, table.Ref(), row_numbers.data(), out.data()}});
  CHECK(SameBits(out, expected));
}

void GradientIsThatOfTheCpu(Combiner combiner, bool weighted, int64_t num_keys, int64_t dim,
                            bool hot) {
  const int64_t num_unique = 50;
  const Case c = RandomCase(combiner, weighted, num_keys, num_unique, dim, hot);
  InlineExecutor ex;
  std::vector<float> expected(num_unique * dim), out(num_unique * dim, -1.0f), again(out);
  CombineGradient(ex, c.samples, c.grad.data(), num_unique, dim, expected.data());
  cuda::Workspace workspace;
  for (std::vector<float>* to : {&out, &again}) {
    cuda::CombineGradient(kStream, workspace,
                          {{c.samples, c.grad.data(), num_unique, dim, to->data()}});
  }
  CHECK(SameBits(out, again));
  // A sum over several tiles is grouped otherwise than the CPU's; relative to what was added.
  std::vector<double> magnitude(num_unique, 1.0);
  for (int32_t u : c.inverse) magnitude[u] += 1.0;
  for (int64_t i = 0; i < num_unique * dim; ++i) {
    CHECK(std::abs(out[i] - expected[i]) <= 1e-6 * magnitude[i / dim]);
  }
  if (num_keys <= 32) CHECK(SameBits(out, expected));  // one tile
}

// Keys that take most of a batch: their partial sums are joined in groups of 64 tiles of 32
// positions. Whole numbers, so that the plain sums are exact in any order.
void HotKeysAreJoinedInGroups(const std::vector<int64_t>& counts, int64_t dim) {
  std::mt19937 random(5);
  Samples samples;
  std::vector<int32_t> inverse;
  for (size_t u = 0; u < counts.size(); ++u) inverse.insert(inverse.end(), counts[u], u);
  std::shuffle(inverse.begin(), inverse.end(), random);
  const int64_t num_keys = inverse.size(), num_unique = counts.size();
  samples.inverse = inverse.data();
  samples.num_keys = num_keys;
  samples.combiner = Combiner::kNone;
  std::vector<float> grad(num_keys * dim), out(num_unique * dim, -1.0f);
  std::vector<int64_t> expected(num_unique * dim, 0);
  for (int64_t i = 0; i < num_keys * dim; ++i) {
    const int value = static_cast<int>(random() % 100);
    grad[i] = static_cast<float>(value);
    expected[inverse[i / dim] * dim + i % dim] += value;
  }
  cuda::Workspace workspace;
  const int64_t before = emulator::num_launches;
  cuda::CombineGradient(kStream, workspace, {{samples, grad.data(), num_unique, dim, out.data()}},
                        true);
  const int64_t launches = emulator::num_launches - before;
  for (int64_t i = 0; i < num_unique * dim; ++i) {
    CHECK_EQ(out[i], static_cast<float>(expected[i]));
  }
  if (!emulator::kEmulated) return;
  // Groups take a launch, and only where there is more than one. CUB's sort takes five more than for
  // few keys.
  static int64_t without_groups = 0;
  if (without_groups == 0) without_groups = launches;
  CHECK_EQ(launches, without_groups + (num_keys > 64 * 32 ? 1 : 0) + (num_keys > 4864 ? 5 : 0));
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  using sok::Combiner;
  sok::UniqueIsInOrderOfFirstOccurrence(0, 1, 1);
  sok::UniqueIsInOrderOfFirstOccurrence(1, 1, 3);
  sok::UniqueIsInOrderOfFirstOccurrence(700, 5, 1);
  sok::UniqueIsInOrderOfFirstOccurrence(700, 300, 4);
  sok::UniqueIsInOrderOfFirstOccurrence(1500, 100000, 7);
  sok::UniqueIsInOrderOfFirstOccurrence(1500, 900, 300);  // more owners than positions in a tile
  for (Combiner combiner : {Combiner::kNone, Combiner::kSum, Combiner::kMean, Combiner::kSqrtn}) {
    for (bool weighted : {false, true}) {
      for (int64_t dim : {3, 8}) sok::CombineHasTheBitsOfTheCpu(combiner, weighted, dim);
      for (int64_t num_keys : {1, 32, 33, 1000}) {
        sok::GradientIsThatOfTheCpu(combiner, weighted, num_keys, 4, num_keys == 1000);
        sok::GradientIsThatOfTheCpu(combiner, weighted, num_keys, 5, false);
      }
    }
  }
  for (int64_t dim : {4, 3}) {
    sok::HotKeysAreJoinedInGroups({64 * 32}, dim);  // one group
    sok::HotKeysAreJoinedInGroups({64 * 32 + 1}, dim);
    sok::HotKeysAreJoinedInGroups({1, 64 * 32 - 1, 1}, dim);  // ends where a group ends
    sok::HotKeysAreJoinedInGroups({64 * 32 - 1, 3 * 64 * 32}, dim);
    sok::HotKeysAreJoinedInGroups({5, 3000, 7, 3500, 40, 32, 1, 2200}, dim);
  }
  CHECK_EQ(emulator::bytes_allocated, 0);
}
