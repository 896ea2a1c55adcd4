// Route: unique keys with inverse, grouped by owner.   (interface; the essay is to be written)
#ifndef SOK_CORE_CPU_ROUTE_H_
#define SOK_CORE_CPU_ROUTE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/parallel.h"

namespace sok {

// Unique keys of one table's batch, grouped by owner rank (key % world_size over uint64).
// Within an owner the order is a pure function of the keys (any thread count gives the same).
class Route {
 public:
  // Writes inverse[i] = position of keys[i] among the unique keys (owner-major).
  Route(Executor& ex, const uint64_t* keys, int64_t num_keys, int64_t world_size,
        int32_t* inverse);  // [num_keys]
  ~Route();

  int64_t num_unique() const;
  const std::vector<int64_t>& owner_offsets() const;       // [world_size + 1] into the unique keys
  void WriteUnique(Executor& ex, uint64_t* unique) const;  // [num_unique]

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ROUTE_H_
