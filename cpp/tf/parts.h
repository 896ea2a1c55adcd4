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

// `count` words at `from` that go to the word `to` of another message.
struct Piece {
  const float* from;
  int64_t to, count;
};

// Writes pieces to a message in host or device memory, then `more_rounds` into the heads of the
// blocks that begin at `heads`.
using WriteMessage = absl::Status (*)(OpKernelContext* ctx, const std::vector<Piece>& pieces,
                                      const std::vector<int64_t>& heads, int32_t more_rounds,
                                      Tensor* message);

// The kernels of SokTakePart and SokJoinParts.
absl::Status TakePart(OpKernelContext* ctx, WriteMessage write);
absl::Status JoinParts(OpKernelContext* ctx, WriteMessage write);

// Shape function: a message of any length, and as many splits as input 1 has.
absl::Status PartShapes(InferenceContext* c);

}  // namespace sok

#endif  // SOK_TF_PARTS_H_
