// Segments of messages under the emulator: moves, offsets, heads, places of rows, and combining
// rows that lie scattered in a message.
#include "cpp/core/cuda/lookup/segments.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/route.h"
#include "cpp/core/cuda/lookup/combine.h"
#include "cpp/core/cuda/lookup/unique.h"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/device_array.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

template <typename T>
void MovesAreCopies(const std::vector<int64_t>& counts) {
  cuda::Workspace workspace;
  int64_t total = 0;
  for (int64_t count : counts) total += count + 3;
  std::vector<T> from(total), to(total, T{0}), expected(total, T{0});
  for (int64_t i = 0; i < total; ++i) from[i] = static_cast<T>(i + 1);
  cuda::SegmentList list;
  int64_t source = 0, target = total;
  for (int64_t count : counts) {  // to the other end, with gaps
    target -= count + 3;
    list.Move(from.data() + source, to.data() + target, count);
    std::copy_n(from.begin() + source, count, expected.begin() + target);
    source += count;
  }
  list.Run(kStream, workspace);
  CHECK(to == expected);
}

void RowsBeginWhereTheirSegmentsSay() {
  cuda::Workspace workspace;
  std::vector<int64_t> offsets(304, -1);
  cuda::SegmentList list;
  list.WriteOffsets(0, 99, 1, offsets.data());
  list.WriteOffsets(300, 1, 4, offsets.data());
  list.WriteOffsets(2, 5000, 3, offsets.data() + 300);
  list.WriteOffsets(1, 7, 9, offsets.data() + 302);
  list.Run(kStream, workspace);
  for (int64_t i = 0; i < 300; ++i) CHECK_EQ(offsets[i], 1 + 4 * i);
  CHECK_EQ(offsets[300], 5000);
  CHECK_EQ(offsets[301], 5003);
  CHECK_EQ(offsets[302], 7);
  CHECK_EQ(offsets[303], -1);
  cuda::SegmentList().Run(kStream, workspace);
}

// Words of the host to several places, beside moves and offsets in the same list.
void KeptWordsGoUpWithTheList() {
  cuda::Workspace workspace;
  const std::vector<int64_t> first = {7, -8}, second = {9, 10, 11}, from = {1, 2};
  std::vector<int64_t> to(12, 0);
  std::vector<float> floats(5, 0.5f);
  cuda::SegmentList list;
  const int64_t a = list.Keep(first.data(), 2), b = list.Keep(second.data(), 3);
  list.MoveKept(b, to.data(), 3);
  list.Move(from.data(), to.data() + 3, 2);
  list.MoveKept(a, to.data() + 5, 2);
  list.MoveKept(a + 1, to.data() + 8, 1);
  list.WriteOffsets(2, 50, 6, to.data() + 9);
  list.MoveKept(a, floats.data(), 4);
  list.Run(kStream, workspace);
  CHECK(to == std::vector<int64_t>({9, 10, 11, 1, 2, 7, -8, 0, -8, 50, 56, 0}));
  CHECK(std::memcmp(floats.data(), first.data(), 16) == 0 && floats[4] == 0.5f);
}

void HeadsOfShortBlocksAreFilledUp() {
  const std::vector<int64_t> message = {1, 2, 3, 4, 5, 6, 7};
  const std::vector<int32_t> lengths = {4, 0, 1, 2};
  const auto heads = cuda::Heads(kStream, message.data(), lengths.data(), 4, 3);
  const std::vector<int64_t> expected = {1, 2, 3, 0, 0, 0, 5, 0, 0, 6, 7, 0};
  CHECK(heads == expected);
}

// A kernel takes the list of segments along; the host waits for none of it to arrive.
void OnlyHeadsAreWaitedFor(int64_t n) {
  cuda::Workspace workspace;
  std::vector<int64_t> words(n, 7), to(n, 0), offsets(n);
  const std::vector<int32_t> lengths(n / 2, 2);
  for (bool warm : {false, true}) {
    const int64_t waits = emulator::num_host_waits, allocations = emulator::num_allocations;
    const int64_t launches = emulator::num_launches;
    cuda::SegmentList list;
    for (int64_t i = 0; i < n; ++i) {
      list.Move(words.data() + i, to.data() + i, 1);
      list.WriteOffsets(1, 3 * i, 1, offsets.data() + i);
    }
    list.Run(kStream, workspace);
    CHECK_EQ(emulator::num_host_waits, waits);
    CHECK_EQ(emulator::num_launches, launches + 2);  // the list, and what it is for
    cuda::Heads(kStream, words.data(), lengths.data(), n / 2, 2);
    CHECK_EQ(emulator::num_host_waits, waits + 1);
    CHECK_EQ(emulator::num_launches, launches + 2 + (n / 2 + 446) / 447);
    if (warm) CHECK_EQ(emulator::num_allocations, allocations);
  }
  CHECK(to == words);
  for (int64_t i = 0; i < n; ++i) CHECK_EQ(offsets[i], 3 * i);
}

template <typename T>
void WordsAreStoredInBlocks(int64_t num_blocks, int64_t blocks_per_launch) {
  const std::vector<T> words = {T(7), T(8), T(9)};
  std::vector<T> message(num_blocks * 5, T(1)), expected(message);
  std::vector<int64_t> targets;
  for (int64_t b = 0; b < num_blocks; ++b) {
    targets.push_back(b * 5 + b % 3);
    std::copy(words.begin(), words.end(), expected.begin() + targets[b]);
  }
  const int64_t launches = emulator::num_launches;
  cuda::StoreInBlocks(kStream, words.data(), 3, targets, message.data());
  CHECK(message == expected);
  CHECK_EQ(emulator::num_launches,
           launches + (num_blocks + blocks_per_launch - 1) / blocks_per_launch);
}

// Streams run late, and the host goes on to write over what it has uploaded.
void UploadedWordsMayChangeAtOnce() {
  const cuda::Stream stream = emulator::StreamOfNumber(1);
  for (const size_t count : {size_t{300}, size_t{1000}, size_t{30'000}}) {
    std::vector<DeviceArray<uint64_t>> arrays;
    for (uint64_t i = 0; i < 20; ++i) arrays.emplace_back(count, i, stream);
    std::vector<uint64_t> words(count);
    for (uint64_t i = 0; i < 20; ++i) {
      std::fill(words.begin(), words.end(), 100 + i);
      cuda::UploadWords(stream, words.data(), count, arrays[i]);
    }
    for (uint64_t i = 0; i < 20; ++i)
      CHECK(arrays[i].Get() == std::vector<uint64_t>(count, 100 + i));
  }
}

void PlacesAreThoseOfTheCpu() {
  InlineExecutor ex;
  const std::vector<int64_t> ids = {0, 1, 5, 9, 9, 4, 6, 7};
  for (int64_t owner : {kAllRanks, int64_t{2}}) {
    const RowPlacement placement = {10, owner, 20};
    std::vector<uint64_t> expected(ids.size()), keys(ids.size());
    PlaceRows(ex, placement, 3, ids.data(), ids.size(), expected.data());
    const int64_t num_keys = static_cast<int64_t>(ids.size());
    cuda::PlaceRows(kStream, 3, {{placement, ids.data(), num_keys, keys.data()}});
    CHECK(keys == expected);
  }
}

// Rows in a message of two ranks behind their heads, of `head` words; what other rows hold must
// stay. With heads of 16 bytes and wide rows all rows are aligned.
struct Message {
  std::vector<float> words;
  std::vector<int64_t> offsets;
};

Message Scatter(const std::vector<float>& rows, int64_t num_rows, int64_t dim, int64_t head) {
  Message message;
  message.words.assign(2 * (num_rows + 1) * dim + 2 * head, 1e30f);
  for (int64_t u = 0; u < num_rows; ++u) {
    message.offsets.push_back(head + u * dim +
                              (u < num_rows / 2 ? 0 : (num_rows + 1) * dim + head));
    std::copy_n(rows.begin() + u * dim, dim, message.words.begin() + message.offsets[u]);
  }
  return message;
}

void ScatteredRowsAreCombinedAsDenseOnes(Combiner combiner, bool weighted, int64_t dim,
                                         int64_t head) {
  const int64_t num_keys = 90, num_unique = 23;
  std::mt19937 random(static_cast<unsigned>(dim));
  std::normal_distribution<float> normal;
  std::vector<int32_t> inverse(num_keys);
  for (int64_t k = 0; k < num_keys; ++k) {
    inverse[k] = static_cast<int32_t>(k < num_unique ? k : random() % num_unique);
  }
  std::vector<float> weights(num_keys), rows(num_unique * dim);
  for (float& w : weights) w = normal(random);
  for (float& x : rows) x = normal(random);
  const std::vector<int64_t> row_splits = {0, 4, 4, 30, 89, 90};
  Samples samples;
  samples.inverse = inverse.data();
  samples.num_keys = num_keys;
  samples.combiner = combiner;
  samples.weights = weighted ? weights.data() : nullptr;
  if (combiner != Combiner::kNone) {
    samples.row_splits = row_splits.data();
    samples.batch = static_cast<int64_t>(row_splits.size()) - 1;
  }
  const int64_t num_samples = combiner == Combiner::kNone ? num_keys : samples.batch;

  InlineExecutor ex;
  std::vector<const float*> pointers;
  for (int64_t u = 0; u < num_unique; ++u) pointers.push_back(&rows[u * dim]);
  std::vector<float> expected(num_samples * dim), out(num_samples * dim, -1.0f);
  CombineRows(ex, samples, pointers.data(), num_unique, dim, expected.data());
  const bool aligned = dim % 4 == 0 && head % 4 == 0;
  const Message message = Scatter(rows, num_unique, dim, head);
  cuda::CombineRows(
      kStream, {{samples, message.words.data(), message.offsets.data(), dim, out.data(), aligned}});
  CHECK(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0);

  // Back: the same bits as in dense rows, and nothing else written.
  cuda::Workspace workspace;
  std::vector<float> grad(num_samples * dim), dense(num_unique * dim);
  for (float& x : grad) x = normal(random);
  cuda::CombineGradient(kStream, workspace,
                        {{samples, grad.data(), num_unique, dim, dense.data()}});
  Message written = Scatter(rows, num_unique, dim, head);
  cuda::CombineGradient(kStream, workspace,
                        {{samples, grad.data(), num_unique, dim, written.offsets.data(),
                          written.words.data(), aligned}});
  CHECK(written.words == Scatter(dense, num_unique, dim, head).words);
}

void ScatteredRowsAreSummed(int64_t num_rows, float scale, int64_t dim, int64_t head) {
  const int64_t num_unique = std::min<int64_t>(7, num_rows);
  const uint32_t first_row = 5;  // rows count over all batches
  std::mt19937 random(static_cast<unsigned>(num_rows));
  std::vector<float> rows(num_rows * dim);
  std::vector<std::vector<uint32_t>> positions_of(num_unique);
  std::vector<double> expected(num_unique * dim, 0.0);
  for (int64_t k = 0; k < num_rows; ++k) {
    const int64_t u = k < num_unique ? k : random() % num_unique;
    positions_of[u].push_back(static_cast<uint32_t>(k));
    for (int64_t d = 0; d < dim; ++d) {
      rows[k * dim + d] = static_cast<float>(static_cast<int>(random() % 100) - 50);
      expected[u * dim + d] += rows[k * dim + d] * scale;
    }
  }
  std::vector<uint32_t> sorted_rows, positions;
  for (int64_t u = 0; u < num_unique; ++u) {
    for (const uint32_t k : positions_of[u]) {
      sorted_rows.push_back(first_row + static_cast<uint32_t>(u));
      positions.push_back(k);
    }
  }
  cuda::Workspace workspace;
  const Message message = Scatter(rows, num_rows, dim, head);
  std::vector<float> out(num_unique * dim, -1.0f);
  cuda::SumScatteredRows(
      kStream, workspace,
      {{sorted_rows.data(), positions.data(), num_rows, first_row, message.words.data(),
        message.offsets.data(), dim, out.data(), dim % 4 == 0 && head % 4 == 0}},
      scale);
  for (int64_t i = 0; i < num_unique * dim; ++i) {
    CHECK_EQ(out[i], static_cast<float>(expected[i]));  // whole numbers: exact
  }
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::MovesAreCopies<uint64_t>({});
  sok::MovesAreCopies<uint64_t>({0, 0});
  sok::MovesAreCopies<uint64_t>({1, 0, 2048, 0, 0, 1, 1, 5000, 3, 0});
  sok::MovesAreCopies<float>({700, 1, 2, 3, 600});
  sok::MovesAreCopies<int64_t>({2049});
  sok::MovesAreCopies<int64_t>(std::vector<int64_t>(3000, 1));  // a list that is copied by itself
  sok::RowsBeginWhereTheirSegmentsSay();
  sok::KeptWordsGoUpWithTheList();
  sok::HeadsOfShortBlocksAreFilledUp();
  for (int64_t n : {10, 500, 5000}) sok::OnlyHeadsAreWaitedFor(n);
  for (int64_t n : {3, 1000}) {
    sok::WordsAreStoredInBlocks<uint64_t>(n, 445);
    sok::WordsAreStoredInBlocks<float>(n, 446);
  }
  sok::PlacesAreThoseOfTheCpu();
  using sok::Combiner;
  for (Combiner combiner : {Combiner::kNone, Combiner::kSum, Combiner::kMean, Combiner::kSqrtn}) {
    for (bool weighted : {false, true}) {
      for (int64_t dim : {1, 3, 8}) {
        for (int64_t head : {1, 4}) {
          sok::ScatteredRowsAreCombinedAsDenseOnes(combiner, weighted, dim, head);
        }
      }
    }
  }
  for (int64_t head : {1, 4}) {
    sok::ScatteredRowsAreSummed(0, 1.0f, 4, head);
    sok::ScatteredRowsAreSummed(20, 1.0f, 4, head);
    sok::ScatteredRowsAreSummed(500, 0.5f, 3, head);
  }
  emulator::host_arrays_allowed = emulator::runs_at_once = false;
  sok::UploadedWordsMayChangeAtOnce();
  CHECK_EQ(emulator::bytes_allocated, 0);
}
