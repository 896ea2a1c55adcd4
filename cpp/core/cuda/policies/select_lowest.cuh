// The rows of least score, without sorting the table: a radix select.
//
//     score, 64 bits | key, 64 bits          read as one number, its digits of 8 bits from the top
//
// A round counts, of the rows that agree with the digits chosen so far, how many have which next
// digit, and chooses the digit in which the wanted number is reached. What lies below it is taken,
// what lies above is not, and the next round goes on within it; when all of it is wanted, the
// rounds that are left do nothing. Then one pass takes the rows up to the number found.
//
// Digits that are the same in all rows have no round: a survey finds them first, and is waited for.
// So LRU takes two or three rounds over the records and as many as ties need over the keys.
// A block counts in shared memory; the counts of all blocks are spread over kCopies sets of
// counters, as they would queue for one.
//
// A full table evicts at every lookup, and what goes next has a number not far above what went
// last. So the survey also lists the rows up to a little beyond where the last selection ended (the
// hint). If these are enough, and not too many, the rounds run over the list instead of the table:
// one pass over all records is left. How much a little is follows from how many were listed the
// last time.
//
// Invariant: which rows are taken depends on scores and keys alone, ties going to the lower key.
#ifndef SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_
#define SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_

#include <cstdint>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/policies/records.h"

namespace sok {
namespace cuda {

// The `count` rows of least score among rows 0 .. num_rows - 1 that hold a key and whose bit in
// `kept` [num_rows / 32 + 1] is not set; there must be as many. `in_order`: lowest first. `hint`
// changes nothing but the cost. Waits.
void SelectLowest(Stream stream, Workspace& workspace, const DeviceRecord* records, ScoreKind kind,
                  Count num_rows, const uint32_t* kept, int64_t count, bool in_order,
                  LowestHint* hint, uint32_t* rows);  // [count]

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_POLICIES_SELECT_LOWEST_CUH_
