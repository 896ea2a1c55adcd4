// Lookup on one rank: from unique keys to combined rows without a copy in between.
//
//     unique keys -> find (or insert) -> row pointers into the arena -> combine -> out
//
// A pointer goes straight from the index to the combiner, so a row is read from the arena once for
// each position that uses it and never written anywhere else first. Rows that cannot be read in
// place (a missing key in evaluation, a row that owes updates to a reader) are made up in scratch
// memory and pointed at there.
//
// Locks: inserting and catching up write, so training takes the exclusive lock; evaluation shares.
#ifndef SOK_CORE_CPU_LOOKUP_H_
#define SOK_CORE_CPU_LOOKUP_H_

#include <cstdint>
#include <string>

#include "cpp/core/batch.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"

namespace sok {

// `unique_keys` must not repeat. With `insert`, missing keys are inserted with their initial row
// (all or nothing; std::length_error when the table is full); without, they read it. With policies
// `insert` observes the keys first, and those without a row read what missing keys read.
void LookupCombine(Executor& ex, CpuTable& table, const uint64_t* unique_keys,  // [num_unique]
                   int64_t num_unique, bool insert, const Samples& samples,
                   float* out);  // [batch, dim], or [num_keys, dim] where the combiner is kNone

// Throws std::invalid_argument naming the table, the first offender and what was required.
// `row_splits` may be null (no samples): [batch + 1] otherwise, and must lead from 0 to num_keys.
void CheckBatch(Executor& ex, const std::string& table, const BatchLimits& limits,
                const uint64_t* keys, int64_t num_keys, const int64_t* row_splits, int64_t batch);

}  // namespace sok

#endif  // SOK_CORE_CPU_LOOKUP_H_
