// DirectRows: key <-> row number in a table without a hashtable, by arithmetic. Shared by host and
// device.
//
//     rank 1 of 3, 4 rows      key     1    4    7   10
//                              row     0    1    2    3
//
// All other keys are refused: keys of other ranks and keys >= num_rows * world_size.
#ifndef SOK_CORE_DIRECT_ROWS_H_
#define SOK_CORE_DIRECT_ROWS_H_

#include <cstdint>

#include "cpp/core/platform.h"
#include "cpp/core/table_options.h"

namespace sok {

struct DirectRows {
  uint64_t num_rows = 0;  // 0: the table has a hashtable
  uint64_t world_size = 1;
  uint64_t rank = 0;

  SOK_HD bool Has(uint64_t key) const {
    return key < num_rows * world_size && key % world_size == rank;  // the product is below 2^63
  }
  SOK_HD uint32_t RowOf(uint64_t key) const { return static_cast<uint32_t>(key / world_size); }
  SOK_HD uint64_t KeyOf(uint64_t row) const { return row * world_size + rank; }
};

DirectRows DirectRowsOf(const TableOptions& options);

// Throws std::out_of_range for a key that DirectRows does not have.
[[noreturn]] void RefuseDirectKey(const TableOptions& options, uint64_t key);

}  // namespace sok

#endif  // SOK_CORE_DIRECT_ROWS_H_
