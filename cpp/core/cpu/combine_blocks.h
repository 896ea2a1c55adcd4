// Combined rows of keys that are found one by one, without unique keys: what evaluation reads.
//
//     keys     | block 0 | block 1 | block 2 | ...        about 256 keys each, whole samples
//     find               | 0       | 1       | 2          and prefetch the rows found
//     combine                      | 0       | 1
//
// The rows of a block arrive in the cache while the next block is looked up. Row numbers and
// pointers of two blocks are all that is kept, and they stay in the L1 cache.
#ifndef SOK_CORE_CPU_COMBINE_BLOCKS_H_
#define SOK_CORE_CPU_COMBINE_BLOCKS_H_

#include <cstdint>

#include "cpp/core/combiner.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"

namespace sok {

// keys: [samples.num_keys]; samples.inverse is not read. Missing keys read CpuTable::MissingRow.
// Needs a lock. The table's rows must owe no steps to a reader.
void CombineBlocks(Executor& ex, const CpuTable& table, const uint64_t* keys,
                   const Samples& samples, float* out);  // [batch, dim] or [num_keys, dim]

}  // namespace sok

#endif  // SOK_CORE_CPU_COMBINE_BLOCKS_H_
