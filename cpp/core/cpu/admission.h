// AdmissionFilter: how often keys without a row have been seen.
//
//     exact    index shard: key -> number -> | count | last step |        grows with the keys
//     Bloom    shard's part of the counters: | c | c | c | ...            a fixed size
//                    key -> k of them, each at least the key's count
//
// Both are divided by the index shard of the key: each thread works on its own shards, and counts
// do not depend on the number of threads. A lookup first reads all counts, plus one for itself;
// only then does it count the keys that stay waiting. So counts do not depend on the order of keys.
//
// Invariant: no count is too low, unless the exact filter forgot the key. The exact filter is never
// too high; the Bloom filter is if other keys share all counters of a key, and it never forgets.
// Counters stop at their largest value.
#ifndef SOK_CORE_CPU_ADMISSION_H_
#define SOK_CORE_CPU_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/cpu/memory.h"
#include "cpp/core/hash.h"
#include "cpp/core/key_records.h"
#include "cpp/core/policy.h"

namespace sok {

// The keys that waited in an exact filter at one instant, while lookups go on. A key is copied before
// it changes, or when the reader comes to it.
class WaitingInstant {
 public:
  bool is_whole() const { return is_whole_; }
  // All keys, ascending; once, when it is whole. Needs no lock. Throws std::bad_alloc.
  std::vector<WaitingKey> Take();

 private:
  friend class ExactFilter;
  struct Shard {
    Memory taken;  // one byte for each entry of the instant: it is copied, or its place was free
    int64_t num_entries = 0;
    std::vector<WaitingKey> keys;  // has room for all from the start
  };
  Shard shards_[kNumShards];
  bool is_whole_ = false;
  // Where the reader goes on, and the layout of the shard's index then.
  int64_t shard_ = 0, bucket_ = 0;
  uint64_t layout_ = 0;
};

class AdmissionFilter {
 public:
  static std::unique_ptr<AdmissionFilter> Make(const PolicyOptions& options);
  virtual ~AdmissionFilter() = default;

  // ---- one thread per shard ----
  // Fetches what the next calls for this key read into the caches.
  virtual void Prefetch(uint64_t hash) const = 0;
  // The key's count once it is seen in `step`: one more, unless it was seen in that step before; or
  // `occurrences` more, if they are not 0.
  virtual int64_t CountWith(uint64_t hash, uint64_t key, int64_t step,
                            int64_t occurrences = 0) const = 0;
  // Makes room for `num_keys` keys that will be counted. Throws std::bad_alloc.
  virtual void Reserve(int shard, int64_t num_keys) = 0;
  // Counts a key as seen in `step`. False if it was already seen in that step.
  virtual bool Count(uint64_t hash, uint64_t key, int64_t step,
                     int64_t occurrences = 0) noexcept = 0;
  // Removes a key that got a row, or is erased; whether it waited. A Bloom filter cannot.
  virtual bool Forget(uint64_t hash, uint64_t key) noexcept = 0;

  // ---- one thread ----
  virtual WaitingKey Find(uint64_t hash, uint64_t key) const = 0;
  // Removes keys that have outlived `steps_to_live`.
  virtual void Expire(int64_t step, int64_t steps_to_live) = 0;
  // If more than `most` keys wait, removes those seen longest ago; returns how many.
  virtual int64_t ForgetOldest(int64_t most) = 0;
  virtual int64_t num_waiting() const = 0;  // 0 for a Bloom filter
  virtual int64_t bytes() const = 0;
  virtual void Clear() = 0;

  // The exact filter exports its waiting keys, ascending; the Bloom filter its counters.
  virtual std::vector<WaitingKey> ExportKeys() const = 0;
  virtual std::vector<int64_t> ExportCounters() const = 0;
  // Throws std::invalid_argument naming both sizes, unless `counters` has the filter's size or is
  // empty. The exact filter ignores them.
  virtual void CheckCounters(const std::vector<int64_t>& counters) const = 0;
  // Takes over counters and waiting keys; both filters take keys. Counters must have been checked.
  virtual void Import(const std::vector<WaitingKey>& keys,
                      const std::vector<int64_t>& counters) = 0;

  // ---- an instant, one at a time; null of a Bloom filter ----
  // Begins it. Throws std::bad_alloc.
  virtual std::shared_ptr<WaitingInstant> BeginInstant() { return nullptr; }
  // Copies the keys of the next buckets. Others may read the filter, but not change it.
  virtual void ReadInstant() {}
  // Copies all that is left, so that the filter may be given up.
  virtual void ReadRestOfInstant() noexcept {}
  virtual void DropInstant() noexcept {}
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ADMISSION_H_
