// The keys that the lookups of a step ask for: kept while observed, counted on request.
#ifndef SOK_TF_BATCH_WATCH_H_
#define SOK_TF_BATCH_WATCH_H_

#include <cstdint>
#include <string>

namespace sok {

// Whether batches are kept right now; costs one load.
bool ObservesBatches();

// Keeps the keys of one feature's batch, together with earlier ones of the table.
void ObserveBatch(const std::string& table, const uint64_t* keys, int64_t num_keys);

}  // namespace sok

#endif  // SOK_TF_BATCH_WATCH_H_
