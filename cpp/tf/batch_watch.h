// Which keys the lookups of a step ask for: kept while somebody observes, counted when asked.
#ifndef SOK_TF_BATCH_WATCH_H_
#define SOK_TF_BATCH_WATCH_H_

#include <cstdint>
#include <string>

namespace sok {

// Whether batches are kept right now; costs one load.
bool ObservesBatches();

// Keeps the keys of one feature's batch, beside those of the table before it.
void ObserveBatch(const std::string& table, const uint64_t* keys, int64_t num_keys);

}  // namespace sok

#endif  // SOK_TF_BATCH_WATCH_H_
