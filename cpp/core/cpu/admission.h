// AdmissionFilter: how often keys were seen that have no row yet.
//
//     exact    index shard: key -> number -> | count | last step |        grows with the keys
//     Bloom    shard's part of the counters: | c | c | c | ...            a fixed size
//                    key -> k of them, each at least the key's count
//
// Both are cut by the index shard of a key, so each thread works on shards of its own, and what a
// key counts does not depend on how many took part. A count is read as of before the lookup, plus
// one for it; only then are the keys that stay waiting counted. So equal lookups give equal counts,
// whatever the order of their keys.
//
// Invariant: no key is counted too seldom. The exact filter is right; the Bloom filter counts too
// often where all counters of a key are shared with others, and never forgets. Counters stop at
// their largest value.
#ifndef SOK_CORE_CPU_ADMISSION_H_
#define SOK_CORE_CPU_ADMISSION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpp/core/key_records.h"
#include "cpp/core/policy.h"

namespace sok {

class AdmissionFilter {
 public:
  static std::unique_ptr<AdmissionFilter> Make(const PolicyOptions& options);
  virtual ~AdmissionFilter() = default;

  // ---- one thread a shard ----
  // What the key will count once it has been seen in `step`: one more, unless it was seen in that
  // step before. Or `occurrences` more, where they are counted.
  virtual int64_t CountWith(uint64_t hash, uint64_t key, int64_t step,
                            int64_t occurrences = 0) const = 0;
  // Makes room for `num_keys` keys that will be counted. Throws std::bad_alloc.
  virtual void Reserve(int shard, int64_t num_keys) = 0;
  // Counts a key as seen in `step`. False: it had been, within the same step.
  virtual bool Count(uint64_t hash, uint64_t key, int64_t step,
                     int64_t occurrences = 0) noexcept = 0;
  // The key has got a row.
  virtual void Forget(uint64_t hash, uint64_t key) noexcept = 0;

  // ---- one thread ----
  virtual WaitingKey Find(uint64_t hash, uint64_t key) const = 0;
  // Forgets keys that have outlived their time.
  virtual void Expire(int64_t step, int64_t steps_to_live) = 0;
  // Forgets the keys seen longest ago where more than `most` wait; how many.
  virtual int64_t ForgetOldest(int64_t most) = 0;
  virtual int64_t num_waiting() const = 0;  // 0 where that is not known
  virtual int64_t bytes() const = 0;
  virtual void Clear() = 0;

  // Waiting keys ascending, of the exact filter; counters of the Bloom filter. The other is empty.
  virtual std::vector<WaitingKey> ExportKeys() const = 0;
  virtual std::vector<int64_t> ExportCounters() const = 0;
  // Throws std::invalid_argument naming both sizes unless counters are of a filter of this size, or
  // none. The exact filter has no use for them.
  virtual void CheckCounters(const std::vector<int64_t>& counters) const = 0;
  // Counts at least what is given; either filter takes keys. Counters must have been checked.
  virtual void Import(const std::vector<WaitingKey>& keys,
                      const std::vector<int64_t>& counters) = 0;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_ADMISSION_H_
