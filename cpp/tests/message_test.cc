// Key messages of other ranks: counts that do not fit their block are refused, whatever their sum.
#include "cpp/core/cpu/message.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/tests/check.h"

namespace sok {
namespace {

// A block with these counts and `words` words behind them.
std::vector<int64_t> Block(const std::vector<int64_t>& counts, int64_t words) {
  std::vector<int64_t> block(kHeadWords<int64_t>);
  WriteHead(Call::Of("users", 3, Stage::kKeys), block.data());
  block.insert(block.end(), counts.begin(), counts.end());
  for (int64_t w = 0; w < words; ++w) block.push_back(100 + w);
  return block;
}

std::vector<std::vector<KeySegment>> Parse(const std::vector<std::vector<int64_t>>& blocks,
                                           std::vector<int64_t>* message, int64_t num_tables) {
  std::vector<int32_t> splits;
  for (const std::vector<int64_t>& block : blocks) {
    message->insert(message->end(), block.begin(), block.end());
    splits.push_back(static_cast<int32_t>(block.size()));
  }
  return ParseKeyMessage(message->data(), splits.data(), static_cast<int64_t>(blocks.size()),
                         num_tables);
}

void SegmentsAreCut() {
  std::vector<int64_t> message;
  const auto segments =
      Parse({Block({1, 0, 2 + kCounted}, 5), Block({0, 2, kCounted}, 2)}, &message, 3);
  CHECK_EQ(segments[0][0].num_keys, 1);
  CHECK_EQ(segments[0][0].keys[0], uint64_t{100});
  CHECK_EQ(segments[0][1].num_keys, 0);
  CHECK_EQ(segments[0][2].num_keys, 2);
  CHECK_EQ(segments[0][2].keys[1], uint64_t{102});
  CHECK_EQ(segments[0][2].occurrences[1], int64_t{104});
  CHECK_EQ(segments[1][1].keys[1], uint64_t{101});
  CHECK_EQ(segments[1][2].num_keys, 0);
}

void CountsThatDoNotFitAreRefused() {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kHuge = int64_t{1} << 61;
  const std::vector<std::vector<int64_t>> all = {
      {4, -1, 1},  // adds up to the block's 4 words
      {-4, 4, 4},
      {kMin, kMin, 4},                          // so do these, modulo 2^64
      {kHuge + kCounted, kHuge + kCounted, 4},  // twice 2 * 2^61 keys
      {kHuge, kHuge, 4},
      {std::numeric_limits<int64_t>::max() - kCounted, 0, 4},
      {5, 0, 0},
      {3, 0, 0},
      {2 + kCounted, 1, 0},
  };
  for (const std::vector<int64_t>& counts : all) {
    std::vector<int64_t> message;
    CHECK_THROWS(Parse({Block({4, 0, 0}, 4), Block(counts, 4)}, &message, 3), std::invalid_argument,
                 "the key message of rank 1 must hold 3 tables");
  }
  std::vector<int64_t> message;
  CHECK_THROWS(Parse({Block({}, 1)}, &message, 3), std::invalid_argument, "of rank 0");
}

}  // namespace
}  // namespace sok

int main() {
  sok::SegmentsAreCut();
  sok::CountsThatDoNotFitAreRefused();
}
