#include "cpp/core/direct_rows.h"

#include <stdexcept>
#include <string>

namespace sok {

DirectRows DirectRowsOf(const TableOptions& options) {
  DirectRows rows;
  if (options.use_hashtable) return rows;
  rows.num_rows = static_cast<uint64_t>(options.max_capacity);
  rows.world_size = static_cast<uint64_t>(options.world_size);
  rows.rank = static_cast<uint64_t>(options.rank);
  return rows;
}

void RefuseDirectKey(const TableOptions& options, uint64_t key) {
  const bool is_signed = options.key_type == KeyType::kInt64 || options.key_type == KeyType::kInt32;
  throw std::out_of_range(
      "Without a hashtable, keys must be in [0, " +
      std::to_string(options.max_capacity * options.world_size) + ") with key % " +
      std::to_string(options.world_size) + " == " + std::to_string(options.rank) +
      ". Received: key " +
      (is_signed ? std::to_string(static_cast<int64_t>(key)) : std::to_string(key)) + " (table '" +
      options.name + "')");
}

}  // namespace sok
