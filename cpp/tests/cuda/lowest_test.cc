// The rows of least score against sorting, under the emulator.
#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "cpp/core/cuda/policies/select_lowest.cuh"
#include "cpp/tests/check.h"
#include "cpp/tests/cuda/device_array.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

void LowestAgainstSorting() {
  std::mt19937_64 random(3);
  cuda::Workspace workspace;
  cuda::LowestHint hint(kStream);  // of other records: it must not matter
  for (int round = 0; round < 90; ++round) {
    const int64_t num_rows = 1 + static_cast<int64_t>(random() % 700);
    const ScoreKind kind = round % 3 == 0   ? ScoreKind::kLru
                           : round % 3 == 1 ? ScoreKind::kLfu
                                            : ScoreKind::kCustom;
    std::vector<cuda::DeviceRecord> records(num_rows);
    std::vector<uint32_t> kept(num_rows / 32 + 1);
    using Candidate = std::pair<std::pair<int64_t, uint64_t>, uint32_t>;
    std::vector<Candidate> expected;
    for (int64_t i = 0; i < num_rows; ++i) {
      cuda::DeviceRecord& record = records[i];
      // Mostly ties, or scores of all magnitudes and signs.
      const int shift = static_cast<int>(random() % 63);
      const int64_t wide = static_cast<int64_t>(random()) >> shift;
      record.key = round % 2 == 0 ? static_cast<uint64_t>(i) : random();
      record.last_step = round % 4 < 2 ? static_cast<int64_t>(random() % 3) : wide & INT64_MAX;
      record.frequency = round % 4 < 2 ? 1 : wide & INT64_MAX;
      record.score = round % 4 < 2 ? -static_cast<int64_t>(random() % 3) : wide;
      if (i % 7 == 3) record.last_step = -1;
      if (random() % 5 == 0) kept[i / 32] |= 1u << (i % 32);
      if (record.last_step < 0 || (kept[i / 32] >> (i % 32) & 1) != 0) continue;
      const int64_t score = kind == ScoreKind::kLru   ? record.last_step
                            : kind == ScoreKind::kLfu ? record.frequency
                                                      : record.score;
      expected.push_back({{score, record.key}, static_cast<uint32_t>(i)});
    }
    if (expected.empty()) continue;
    std::sort(expected.begin(), expected.end());
    const int64_t count = round % 5 == 0 ? static_cast<int64_t>(expected.size())
                                         : 1 + static_cast<int64_t>(random() % expected.size());
    for (const bool in_order : {true, false}) {
      // Anything may have been written down, up to the largest number.
      for (int word = 0; word < 2; ++word) {
        const uint64_t end = random() % 8 == 0 ? ~uint64_t{0} : random();
        if (random() % 4 != 0) continue;
        cuda::CopyToDevice(kStream, hint.end.as<uint64_t>() + word, &end, sizeof(end));
      }
      if (random() % 4 == 0) hint.slack_bits = static_cast<int>(random() % 128);
      const DeviceArray<uint32_t> device_rows(count + 1, 12345u, kStream);
      cuda::SelectLowest(kStream, workspace, DeviceArray<cuda::DeviceRecord>(records, kStream),
                         kind, num_rows, DeviceArray<uint32_t>(kept, kStream), count, in_order,
                         round % 9 == 8 ? nullptr : &hint, device_rows);
      std::vector<uint32_t> rows = device_rows.Get();
      CHECK_EQ(rows[count], 12345u);
      rows.pop_back();
      std::vector<uint32_t> wanted;
      for (int64_t i = 0; i < count; ++i) wanted.push_back(expected[i].second);
      if (!in_order) {
        std::sort(rows.begin(), rows.end());
        std::sort(wanted.begin(), wanted.end());
      }
      CHECK(rows == wanted);
    }
  }
}

// A full table of which a few rows go at each lookup: the hint spares the passes over all of it.
void TheHintIsUsed(ScoreKind kind) {
  std::mt19937_64 random(4);
  cuda::Workspace workspace;
  cuda::LowestHint hint(kStream);
  constexpr int64_t kRows = 40000, kCount = 20;
  std::vector<cuda::DeviceRecord> records(kRows);
  for (int64_t i = 0; i < kRows; ++i) records[i] = {random(), 1 + i % 2, i / 100, 0};
  const std::vector<uint32_t> kept(kRows / 32 + 1);
  const DeviceArray<uint32_t> device_kept(kept, kStream), device_rows(kCount, 0u, kStream);
  int num_used = 0;
  for (int64_t step = 0; step < 12; ++step) {
    cuda::SelectLowest(kStream, workspace, DeviceArray<cuda::DeviceRecord>(records, kStream), kind,
                       kRows, device_kept, kCount, true, &hint, device_rows);
    const std::vector<uint32_t> rows = device_rows.Get();
    num_used += hint.was_used ? 1 : 0;
    std::vector<uint32_t> expected(kRows);
    for (int64_t i = 0; i < kRows; ++i) expected[i] = static_cast<uint32_t>(i);
    std::partial_sort(expected.begin(), expected.begin() + kCount, expected.end(),
                      [&](uint32_t a, uint32_t b) {
                        const cuda::DeviceRecord &x = records[a], &y = records[b];
                        const uint64_t p = cuda::OrderedScore(x, kind);
                        const uint64_t q = cuda::OrderedScore(y, kind);
                        return p != q ? p < q : x.key < y.key;
                      });
    CHECK(std::equal(rows.begin(), rows.end(), expected.begin()));
    for (uint32_t row : rows) records[row] = {random(), 1, 1000 + step, 0};
  }
  CHECK(num_used >= 9);
}

}  // namespace
}  // namespace sok

int main() {
  sok::LowestAgainstSorting();
  sok::TheHintIsUsed(sok::ScoreKind::kLru);
  sok::TheHintIsUsed(sok::ScoreKind::kLfu);
  CHECK_EQ(emulator::bytes_allocated, 0);
}
