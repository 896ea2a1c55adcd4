// Checks of a batch on the device: the CPU's verdict, in its words, for good and bad batches.
#include "cpp/tests/check.h"

#include <random>
#include <vector>

#include "cpp/core/cpu/lookup.h"
#include "cpp/core/cuda/lookup/check_batch.h"
#include "cpp/tests/cuda/runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

struct Batch {
  std::vector<uint64_t> keys;
  std::vector<int64_t> row_splits;  // empty: no samples
  BatchLimits limits;
};

Batch GoodBatch(int64_t batch, int64_t hotness) {
  Batch made;
  made.row_splits = {0};
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = b % (hotness + 1);
    for (int64_t k = 0; k < length; ++k) made.keys.push_back(static_cast<uint64_t>(b * 7 + k));
    made.row_splits.push_back(static_cast<int64_t>(made.keys.size()));
  }
  made.limits.max_hotness = hotness;
  return made;
}

std::string OnTheCpu(const Batch& b) {
  InlineExecutor ex;
  try {
    CheckBatch(ex, "t", b.limits, b.keys.data(), b.keys.size(),
               b.row_splits.empty() ? nullptr : b.row_splits.data(),
               static_cast<int64_t>(b.row_splits.size()) - 1);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

std::string OnTheDevice(const Batch& b) {
  cuda::BatchInput input;
  input.table = "t";
  input.limits = b.limits;
  input.keys = b.keys.data();
  input.num_keys = static_cast<int64_t>(b.keys.size());
  if (!b.row_splits.empty()) {
    input.row_splits = b.row_splits.data();
    input.batch = static_cast<int64_t>(b.row_splits.size()) - 1;
  }
  std::vector<cuda::BatchFinding> finding(1);
  cuda::FillWithOnes(kStream, finding.data(), sizeof(cuda::BatchFinding));
  cuda::CheckBatches(kStream, {input}, finding.data());
  cuda::Synchronize(kStream);
  try {
    cuda::RefuseFound(kStream, input, finding[0]);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// `expected`: a part of the text; empty for a batch that is to pass.
void Agree(const Batch& batch, const std::string& expected) {
  const std::string text = OnTheDevice(batch);
  if (text != OnTheCpu(batch)) CheckFailed(__FILE__, __LINE__, text + " / " + OnTheCpu(batch));
  if (text.empty() != expected.empty() || text.find(expected) == std::string::npos) {
    CheckFailed(__FILE__, __LINE__, "'" + text + "' for '" + expected + "'");
  }
}

void GoodBatchesPassWithoutWaiting() {
  const int64_t waits = emulator::num_host_waits;
  Agree(GoodBatch(0, 3), "");
  Agree(GoodBatch(1, 3), "");
  Agree(GoodBatch(700, 4), "");
  Batch keys_only = GoodBatch(700, 4);
  keys_only.row_splits.clear();
  keys_only.limits = {0, 700 * 7, 2};
  Agree(keys_only, "");
  keys_only.keys.clear();
  Agree(keys_only, "");
  CHECK_EQ(emulator::num_host_waits, waits + 5);  // those of this test, to see what was found
}

void BadBatchesAreRefused() {
  Batch b = GoodBatch(700, 4);
  b.row_splits[300] += 1000;  // too long a sample, and a decrease behind it
  Agree(b, "keys in row 299 (table 't')");
  b = GoodBatch(700, 4);
  b.row_splits[650] = -5;
  b.row_splits[400] = 0;
  Agree(b, "at sample 399 (table 't')");
  b.row_splits.back() += 1;
  Agree(b, "row_splits must begin with 0");
  b = GoodBatch(700, 4);
  b.row_splits[0] = 1;
  Agree(b, "Received: 1 and");
  b = GoodBatch(700, 4);
  b.limits.multiple = 3;
  Agree(b, "the number of rows must be a multiple of 3. Received: 700");
  b.row_splits.clear();
  b.keys.resize(200);
  Agree(b, "the number of keys must be a multiple of 3. Received: 200");
  b.limits = {0, 500, 1};
  b.keys.assign(600, 0);
  b.keys[517] = 500;
  b.keys[518] = ~uint64_t{0};
  Agree(b, "must lie in [0, 500). Received: key 500 at position 517");
  b.keys[20] = ~uint64_t{0};
  Agree(b, "Received: key -1 at position 20");
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::GoodBatchesPassWithoutWaiting();
  sok::BadBatchesAreRefused();
  CHECK_EQ(emulator::bytes_allocated, 0);
}
