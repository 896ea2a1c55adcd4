// One step on a 16-bit row: a few columns at a time are widened, updated together with their slot
// values in the layout that every rule expects, and rounded back.
//
//     columns of the row, widened | of slot 0 | of slot 1 | ...     kColumns floats each
#ifndef SOK_CORE_CPU_NARROW_UPDATE_H_
#define SOK_CORE_CPU_NARROW_UPDATE_H_

#include <algorithm>
#include <cstdint>

#include "cpp/core/cpu/row_format.h"
#include "cpp/core/optimizer.h"

namespace sok {

// The row being updated, and what its random rounding depends on.
struct NarrowRow {
  const RowFormat& format;
  float* row;
  uint64_t key;
  int64_t step;
  int64_t dim;

  static constexpr int64_t kColumns = 64;  // results depend on it

  float* slots() const { return row + format.embedding_floats(); }

  // Calls update(first, count, columns) for blocks of all columns; it overwrites `columns` [count].
  template <int kSlots, typename Update>
  void ForEachBlock(const Update& update) const {
    float block[kColumns * (1 + kSlots)];
    for (int64_t first = 0; first < dim; first += kColumns) {
      const int64_t count = std::min(kColumns, dim - first);
      format.ReadColumns(row, first, count, block);
      for (int s = 0; s < kSlots; ++s) {
        std::copy_n(slots() + s * dim + first, count, block + (s + 1) * kColumns);
      }
      update(first, count, block);
      for (int s = 0; s < kSlots; ++s) {
        std::copy_n(block + (s + 1) * kColumns, count, slots() + s * dim + first);
      }
      format.WriteUpdated(block, key, step, first, count, row);
    }
  }
};

template <typename Rule>
void UpdateNarrowRow(const Rule& rule, const float* grad, float clip_value, const NarrowRow& to) {
  to.template ForEachBlock<Rule::kSlots>([&](int64_t first, int64_t count, float* block) {
#pragma omp simd
    for (int64_t d = 0; d < count; ++d) {
      rule.Update(Clip(grad[first + d], clip_value), block + d, NarrowRow::kColumns);
    }
  });
}

}  // namespace sok

#endif  // SOK_CORE_CPU_NARROW_UPDATE_H_
