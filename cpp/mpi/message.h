// What one rank tells another: the first message of a block, or a word about a collective.
//
//     head | key | the block, if all of it fits, else a message of its own with the head's tag
#ifndef SOK_MPI_MESSAGE_H_
#define SOK_MPI_MESSAGE_H_

#include <cstdint>
#include <string>

namespace sok {

// Bytes of a message; Open MPI copies so many through shared memory without asking the other side.
constexpr int kMessageBytes = 4000;
// Bytes of a key; longer ones are refused.
constexpr int kLongestKey = 1000;
constexpr int kHeadTag = 1;
// Tags of blocks. Every MPI has so many.
constexpr int kFirstBlockTag = 2, kLastBlockTag = 32767;
// MPI counts in int32, so a longer block is sent in pieces.
constexpr int64_t kPieceBytes = int64_t{1} << 30;
// Pieces of a sum, which MPI sends, adds and returns at the same time. In one piece, the 13 MiB of two
// ranks took Open MPI twice as long.
constexpr int64_t kSumPieceBytes = int64_t{1} << 20;

struct MessageHead {
  enum Kind : int32_t { kBlock, kReady, kGo };
  int32_t kind = kBlock;
  int32_t from = -1;  // rank of the job; -1: no message yet
  int32_t dtype = 0;
  int32_t tag = 0;   // of the message with the block; 0: it is in this one
  int64_t rows = 0;  // of the block; of a collective its elements
  int64_t row_bytes = 0;
  int32_t key_bytes = 0;
  int32_t root = 0;         // of a collective
  int32_t block_bytes = 0;  // in this message: of the block, or of a text
  int32_t unused = 0;
};

struct Message {
  MessageHead head;
  std::string key, block;
};

}  // namespace sok

#endif  // SOK_MPI_MESSAGE_H_
