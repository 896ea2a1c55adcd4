#include "cpp/core/cpu/combine_blocks.h"

#include <algorithm>
#include <utility>

#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/row_format.h"
#include "cpp/core/cpu/row_ops.h"
#include "cpp/core/cpu/scratch.h"

namespace sok {
namespace {

constexpr int64_t kGrain = 1024;  // keys worth handing to another thread
constexpr int64_t kBlockKeys = 256;

// The rows of one block of keys.
class FoundBlock {
 public:
  FoundBlock(const CpuTable& table, int64_t max_keys)
      : table_(table), max_keys_(max_keys), numbers_(max_keys), rows_(max_keys) {}

  // Needs a lock from here until Rows.
  void Find(const uint64_t* keys, int64_t num_keys) {
    keys_ = keys;
    num_keys_ = num_keys;
    InlineExecutor here;
    table_.FindRows(here, keys, num_keys, numbers_.get());
    const int64_t row_floats = table_.format().embedding_floats();
    for (int64_t i = 0; i < num_keys; ++i) {
      if (numbers_[i] == kNoRow) continue;
      rows_[i] = table_.Row(numbers_[i]);
      PrefetchRow<false>(rows_[i], row_floats);
    }
  }

  // Missing keys read MissingRow; rows of 16 bits are widened. The table owes no steps.
  const float* const* Rows() {
    const RowFormat& format = table_.format();
    for (int64_t i = 0; i < num_keys_; ++i) {
      const bool is_missing = numbers_[i] == kNoRow;
      if (!is_missing && !format.is_narrow()) continue;
      if (!made_up_) made_up_ = Scratch<float>(max_keys_ * table_.dim());
      float* const row = made_up_.get() + i * table_.dim();
      if (is_missing) {
        table_.MissingRow(keys_[i], row);
      } else {
        format.Read(rows_[i], row);
      }
      rows_[i] = row;
    }
    return rows_.get();
  }

 private:
  const CpuTable& table_;
  const int64_t max_keys_;
  const uint64_t* keys_ = nullptr;
  int64_t num_keys_ = 0;
  Scratch<uint32_t> numbers_;
  Scratch<const float*> rows_;
  Scratch<float> made_up_;  // [max_keys, dim] where it is needed
};

// Samples [begin, end), whose keys are those of the block.
void CombineBlock(FoundBlock* block, const Samples& samples, int64_t begin, int64_t end,
                  int64_t dim, float* out) {
  const int64_t first_key = samples.Begin(begin);
  int64_t row_splits[kBlockKeys + 1];
  for (int64_t s = begin; s <= end; ++s) row_splits[s - begin] = samples.Begin(s) - first_key;
  Samples part = samples;
  part.inverse = nullptr;
  part.num_keys = row_splits[end - begin];
  part.row_splits = row_splits;
  part.batch = end - begin;
  if (part.weights != nullptr) part.weights += first_key;
  InlineExecutor here;
  CombineRows(here, part, block->Rows(), part.num_keys, dim, out + begin * dim);
}

// Where the block that begins with sample `begin` ends: at most kBlockKeys samples, and keys unless
// one sample has more.
int64_t BlockEnd(const Samples& samples, int64_t begin, int64_t last) {
  const int64_t most_keys = samples.Begin(begin) + kBlockKeys;
  int64_t end = begin + 1;
  while (end < last && end - begin < kBlockKeys && samples.End(end) <= most_keys) ++end;
  return end;
}

void CombineRange(const CpuTable& table, const uint64_t* keys, const Samples& samples,
                  int64_t first, int64_t last, float* out) {
  int64_t most_keys = kBlockKeys;
  for (int64_t s = first; s < last; ++s) {
    most_keys = std::max(most_keys, samples.End(s) - samples.Begin(s));
  }
  FoundBlock blocks[] = {{table, most_keys}, {table, most_keys}};
  FoundBlock *found = &blocks[0], *next = &blocks[1];
  int64_t found_begin = first, begin = first;
  while (begin < last) {
    const int64_t end = BlockEnd(samples, begin, last);
    next->Find(keys + samples.Begin(begin), samples.Begin(end) - samples.Begin(begin));
    if (begin > first) CombineBlock(found, samples, found_begin, begin, table.dim(), out);
    std::swap(found, next);
    found_begin = begin;
    begin = end;
  }
  CombineBlock(found, samples, found_begin, last, table.dim(), out);
}

}  // namespace

void CombineBlocks(Executor& ex, const CpuTable& table, const uint64_t* keys,
                   const Samples& samples, float* out) {
  table.BringKeys(ex, keys, samples.num_keys, /*writes=*/false);
  const int64_t num_samples = samples.num_samples();
  const int64_t keys_each = 1 + samples.num_keys / std::max<int64_t>(1, num_samples);
  const int64_t grain = std::max<int64_t>(1, kGrain / keys_each);
  ex.ParallelFor(num_samples, grain, [&](int64_t first, int64_t last) {
    CombineRange(table, keys, samples, first, last, out);
  });
}

}  // namespace sok
