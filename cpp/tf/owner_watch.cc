#include "cpp/tf/owner_watch.h"

#include <algorithm>

namespace sok {
namespace {

using Callback = void (*)(const char* table, int64_t owner, double times_its_share);
std::atomic<Callback> uneven{nullptr};

}  // namespace

OwnerWatch::OwnerWatch(int64_t num_tables, int64_t world_size)
    : num_keys_(kPerRank * world_size), tables_(num_tables), unjudged_(num_tables) {
  for (Table& table : tables_) table.by_owner.resize(world_size);
}

void OwnerWatch::See(int64_t i, const std::string& name, const std::vector<uint64_t>& keys,
                     const std::vector<int64_t>& owner_offsets) {
  double most = 0;  // times its share
  int64_t owner = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Table& table = tables_[i];
    if (table.judged) return;
    const int64_t world_size = static_cast<int64_t>(table.by_owner.size());
    for (int64_t r = 0; r < world_size; ++r) {
      for (int64_t k = owner_offsets[r]; k < owner_offsets[r + 1]; ++k) {
        table.by_owner[r] += table.keys.insert(keys[k]).second;
      }
    }
    table.num_seen += static_cast<int64_t>(keys.size());
    const int64_t num_keys = static_cast<int64_t>(table.keys.size());
    if (num_keys >= num_keys_) {
      const auto largest = std::max_element(table.by_owner.begin(), table.by_owner.end());
      owner = largest - table.by_owner.begin();
      most = static_cast<double>(*largest) * world_size / num_keys;
    }
    if (num_keys >= num_keys_ || table.num_seen >= kPatience * num_keys_) Finish(&table);
  }
  const Callback tell = uneven;
  if (most >= kUneven && tell != nullptr) tell(name.c_str(), owner, most);
}

void OwnerWatch::Ignore(int64_t i) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!tables_[i].judged) Finish(&tables_[i]);
}

void OwnerWatch::Finish(Table* table) {
  table->judged = true;
  table->keys = {};
  unjudged_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace sok

// Called, maybe in a thread of an op, for each table and lookup whose keys are uneven.
extern "C" __attribute__((visibility("default"))) void sok_on_uneven_owners(
    sok::Callback callback) {
  sok::uneven = callback;
}
