// Selects the rows of lowest score without sorting the table: a radix select.
//
//     score, 64 bits | key, 64 bits          read as one number, its digits of 8 bits from the top
//
// A round takes the rows that agree with the digits chosen so far and counts them by next digit. It
// chooses the digit at which the wanted number of rows is reached. Rows below are taken, rows above
// are not, and the next round continues within the digit. If all its rows are wanted, the remaining
// rounds do nothing. In the end one pass takes the rows up to the number found.
//
// Digits that are equal in all rows need no round: a survey finds them first, and the host waits
// for it. So LRU takes two or three rounds for the scores and as many for the keys as ties need.
// A block counts in shared memory; the counts of all blocks are spread over kCopies sets of
// counters to avoid contention.
//
// A full table evicts at every lookup, and the next rows have numbers not far above the last ones.
// So the survey also lists the rows up to a little beyond the end of the last selection (the hint).
// If these are enough, and not too many, the rounds run over the list instead of the table: only
// one pass over all records is left. The length of the last list decides how far beyond to go.
//
// Invariant: which rows are taken depends on scores and keys alone; of ties, the lower key.
#ifndef SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_
#define SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/policies/records.h"

namespace sok {
namespace cuda {

// The `count` rows of least score among rows 0 .. num_rows - 1 that hold a key and whose bit in
// `kept` [num_rows / 32 + 1] is not set; there must be so many. `in_order`: lowest first. `hint`
// affects only the cost. Waits.
void SelectLowest(Stream stream, Workspace& workspace, const DeviceRecord* records, ScoreKind kind,
                  Count num_rows, const uint32_t* kept, int64_t count, bool in_order,
                  LowestHint* hint, uint32_t* rows);  // [count]

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_
