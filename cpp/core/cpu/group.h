// Group: several tables in one call, on several threads.
//
//     named       B A C A            as the call names them; a table may occur twice
//     locked      A B C              each once, in order of address
//     processed   B(0) A(1,3) C(2)   tables of similar size: in parallel, one thread each; a few, or
//                                    one much larger: one after the other, each with all threads
//
// In parallel, threads synchronise once per call and not once per pass and table. Many small tables
// need that.
//
// Invariant: the calling thread locks all tables before. The threads that share the call's work take
// no table's lock, only those that nobody holds while waiting for the pool (parallel.h). Locks are
// taken in one order, so two calls on the same tables cannot wait for each other.
//
// Results do not depend on how work is shared: every table is processed, even if another one fails,
// and the error is that of the first.
#ifndef SOK_CORE_CPU_GROUP_H_
#define SOK_CORE_CPU_GROUP_H_

#include <cstdint>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/parallel.h"

namespace sok {

// Calls fn(executor, i) for every i, in parallel or in turn depending on num_keys. If calls throw,
// the exception of the lowest i is rethrown once all have ended.
void ForEachOf(Executor& ex, const std::vector<int64_t>& num_keys,
               FunctionRef<Executor&, int64_t> fn);

class TableGroup {
 public:
  explicit TableGroup(const std::vector<CpuTable*>& tables);  // [num_members], may repeat

  // A table that is named more than once; null if there is none.
  const CpuTable* repeated() const { return repeated_; }

  // The keys of each table, in the order of ForEach. num_keys: [num_members].
  std::vector<int64_t> PerTable(const std::vector<int64_t>& num_keys) const;
  // Calls fn(executor, members, count) for every table, with its members in order: positions in
  // `tables`. of_tables: what PerTable returned. Allocates nothing.
  void ForEach(Executor& ex, const std::vector<int64_t>& of_tables,
               FunctionRef<Executor&, const int64_t*, int64_t> fn) const;

  // Holds the locks of all tables while it lives.
  class Lock {
   public:
    Lock(const TableGroup& group, bool exclusive);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    const std::vector<CpuTable*>& tables_;
    const bool exclusive_;
  };

 private:
  std::vector<CpuTable*> by_address_;  // each table once
  const CpuTable* repeated_ = nullptr;
  std::vector<int64_t> order_;    // [num_members] members, those of one table together
  std::vector<int64_t> offsets_;  // [num_tables + 1] into order_; tables by first member
};

}  // namespace sok

#endif  // SOK_CORE_CPU_GROUP_H_
