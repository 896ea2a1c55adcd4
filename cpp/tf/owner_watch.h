// Whether the keys of a batch's tables are spread evenly over the ranks that own them.
//
// A key's owner is key % world_size, so keys with a common factor may all have one owner. The first
// different keys that a lookup sends are counted by owner, kPerRank for each rank. If an owner has
// kUneven times its share of them, the program is told, once. Afterwards watching costs one load.
#ifndef SOK_TF_OWNER_WATCH_H_
#define SOK_TF_OWNER_WATCH_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace sok {

class OwnerWatch {
 public:
  OwnerWatch(int64_t num_tables, int64_t world_size);

  bool done() const { return unjudged_.load(std::memory_order_relaxed) == 0; }
  // The keys of a table in a batch, each once; those of rank r begin at owner_offsets[r]
  // [world_size + 1].
  void See(int64_t table, const std::string& name, const std::vector<uint64_t>& keys,
           const std::vector<int64_t>& owner_offsets);
  // Of a table whose keys have another rule of ownership.
  void Ignore(int64_t table);

 private:
  // By chance, no rank has kUneven times its share of so many keys.
  static constexpr int64_t kPerRank = 256;
  static constexpr double kUneven = 1.5;
  // A table that has not shown enough different keys among so many times as many is a small one.
  static constexpr int64_t kPatience = 64;

  struct Table {
    std::unordered_set<uint64_t> keys;
    std::vector<int64_t> by_owner;
    int64_t num_seen = 0;
    bool judged = false;
  };
  void Finish(Table* table);  // needs mutex_

  const int64_t num_keys_;
  std::mutex mutex_;
  std::vector<Table> tables_;
  std::atomic<int64_t> unjudged_;
};

}  // namespace sok

#endif  // SOK_TF_OWNER_WATCH_H_
