// Lookup in the tables of one rank: from unique keys to combined rows without a copy in between.
//
//     unique keys -> find (or insert) -> row pointers into the arena -> combine -> out
//
// An owner looks up the keys that all ranks ask it for in the same way, without samples. It copies
// their rows to the places that they have in the ranks' messages.
//
// A lookup that does not insert takes the keys as they come. Unique keys are for inserting and for
// the gradient, which finds them itself where it is wanted.
//
// A pointer goes straight from the index to the combiner, so a row is read from the arena once for
// each position that uses it and never written anywhere else first. Rows that cannot be read in
// place (a missing key in evaluation, a row that owes updates to a reader) are made up in scratch
// memory and pointed at there.
//
// Rows on disk: those of all features are fetched in one go, before the first is read.
//
// All features of a group are looked up together, several tables side by side (group.h). Inserting
// and catching up write, so training takes the exclusive locks of all tables; evaluation shares.
#ifndef SOK_CORE_CPU_LOOKUP_H_
#define SOK_CORE_CPU_LOOKUP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/batch.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"

namespace sok {

// Where the rows of consecutive keys go.
struct RowBlock {
  int64_t num_keys = 0;
  float* rows = nullptr;  // [num_keys, dim], written
};

// Keys to look up in one table.
struct FeatureLookup {
  CpuTable* table = nullptr;
  const uint64_t* keys = nullptr;  // [samples.num_keys]
  // [num_keys] How often each key occurs, for tables that count that; null: once each.
  const int64_t* occurrences = nullptr;
  Samples samples;  // but its `inverse`, which is written below
  // Written with `insert`, for the gradient; without it neither read nor written:
  int32_t* inverse = nullptr;       // [num_keys]
  uint64_t* unique_keys = nullptr;  // [num_keys], the first num_unique of them
  int64_t num_unique = 0;
  // Written: [batch, dim], or [num_keys, dim] where the combiner is kNone. An owner has `blocks`
  // instead, in the order of the keys; its combiner is kNone.
  float* out = nullptr;
  std::vector<RowBlock> blocks;
  // [num_keys, dim] Written unless null: the row of each key, for the gradient of weights.
  float* key_rows = nullptr;
};

// With `insert`, missing keys are inserted with their initial row; without, they read it. With
// policies `insert` observes a table's keys first, those of all its features in one call, and those
// without a row read what missing keys read. A table may have several features.
//
// Each table is all or nothing (std::length_error when it is full). Others without policies are
// looked up all the same: their new keys have their initial rows. No table with policies has counted
// the lookup or evicted a key. The error is that of the first, and nothing that was written counts.
void LookupGroup(Executor& ex, std::vector<FeatureLookup>* features, bool insert);

// Throws std::invalid_argument naming the table, the first offender and what was required.
// `row_splits` may be null (no samples): [batch + 1] otherwise, and must lead from 0 to num_keys.
void CheckBatch(Executor& ex, const std::string& table, const BatchLimits& limits,
                const uint64_t* keys, int64_t num_keys, const int64_t* row_splits, int64_t batch);

}  // namespace sok

#endif  // SOK_CORE_CPU_LOOKUP_H_
