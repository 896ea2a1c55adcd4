// A message that is too large for the transport travels in rounds, each with a part of each block.
//
//     block for rank r   [0, w) in the first round | [w, 2w) in the second | ..     w: WordsOfRound
//
// The first round brings the heads, which say how many rounds follow (message.h).
#ifndef SOK_TF_PARTS_H_
#define SOK_TF_PARTS_H_

#include <cstdint>
#include <vector>

#include "cpp/tf/common.h"

namespace sok {

// Words [from, from + count) of one message that are [to, to + count) of another.
struct Piece {
  int64_t from, to, count;
};

struct Part {
  std::vector<int32_t> lengths;  // of its blocks
  std::vector<int64_t> starts;   // of its blocks
  std::vector<Piece> pieces;     // of the whole message
  int64_t num_words = 0;
  int32_t more_rounds = 0;  // after this one, for the longest block
};

// What of a message with blocks of these lengths travels in a round, counted from 0.
Part PartOf(const std::vector<int32_t>& lengths, int64_t round);

// Blocks with the next part of each behind it.
struct Joined {
  std::vector<int32_t> lengths;
  std::vector<int64_t> starts;
  std::vector<Piece> of_blocks, of_parts;
  int64_t num_words = 0;
};
Joined Join(const std::vector<int32_t>& blocks, const std::vector<int32_t>& parts);

// Output 1, int32 [world_size], and what such a tensor holds.
absl::Status SetLengths(OpKernelContext* ctx, const std::vector<int32_t>& lengths);
std::vector<int32_t> LengthsOf(const Tensor& splits);

}  // namespace sok

#endif  // SOK_TF_PARTS_H_
