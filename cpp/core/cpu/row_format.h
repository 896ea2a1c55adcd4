// RowFormat: how an embedding lies in memory, and how it is read and written.
//
//     float32                | embedding, dim floats                 | slot rows |
//     bfloat16, float16      | embedding, dim halves | pad to 4 bytes | slot rows |
//
// Slot rows are float32 always, and so is everything outside of a table: lookups, gradients, dumps.
//
// Assigned and initial rows are rounded to nearest. Rows that an optimizer updated are rounded up
// or down at random, so that small steps add up. Like initial rows, the random bits are a function
// of (seed, table name, key, column, step): they depend on no thread, rank or order.
//
//     Philox counter   | key, low half | key, high half | first column | step |   for <= 64 columns
//     Philox block     | start | stride | unused |
//     bits of column   mixed(start + (column - first) * stride)
//
// Invariant: Write of the values that Read gave leaves the row unchanged.
#ifndef SOK_CORE_CPU_ROW_FORMAT_H_
#define SOK_CORE_CPU_ROW_FORMAT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpp/core/initializer.h"
#include "cpp/core/narrow.h"
#include "cpp/core/table_options.h"

namespace sok {

class RowFormat {
 public:
  RowFormat(RowType type, int64_t dim, const Initializer& initializer)
      : type_(type),
        dim_(dim),
        philox_key0_(initializer.philox_key0 ^ 0x5bd1e995u),
        philox_key1_(initializer.philox_key1) {}

  bool is_narrow() const { return type_ != RowType::kFloat32; }
  // Floats from a row to its slot rows.
  int64_t embedding_floats() const { return is_narrow() ? (dim_ + 1) / 2 : dim_; }

  // ---- narrow rows only ----
  // `values` [dim].
  void Read(const float* row, float* values) const { ReadColumns(row, 0, dim_, values); }
  void Write(const float* values, float* row) const;
  // Changes `values` as Write and then Read would.
  void Round(float* values) const;
  // Whether rounding makes no finite value infinite.
  bool Holds(const float* values, int64_t count) const;

  // Columns [first, first + count) of an update.
  void ReadColumns(const float* row, int64_t first, int64_t count, float* values) const;
  void WriteUpdated(const float* values, uint64_t key, int64_t step, int64_t first, int64_t count,
                    float* row) const;

 private:
  RowType type_;
  int64_t dim_;
  uint32_t philox_key0_, philox_key1_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_FORMAT_H_
