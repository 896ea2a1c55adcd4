// Device tables: equal new keys take one row, and Clear leaves nothing of before behind.
#include <vector>

#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/update/apply.h"
#include "cpp/tests/check.h"
#include "cpp/tests/emulator/cuda_runtime.h"

namespace sok {
namespace {

constexpr cuda::Stream kStream = nullptr;

void EqualKeysTakeOneRow() {
  TableOptions options;
  options.name = "t";
  options.dim = 256;  // 2048 rows per chunk
  constexpr int64_t kCopies = 5000;
  std::vector<uint64_t> keys(kCopies, 7);
  keys.front() = 6;
  keys.back() = 8;
  std::vector<float> rows(kCopies * options.dim, 1.0f);
  rows[(kCopies - 2) * options.dim] = 2.0f;  // of the last copy
  cuda::CudaTable table(options);
  table.Assign(kStream, keys.data(), kCopies, rows.data());
  std::vector<float> read(3 * options.dim);
  const std::vector<uint64_t> each = {6, 7, 8};
  table.Find(kStream, each.data(), 3, read.data(), nullptr);
  CHECK(read[0] == 1.0f && read[options.dim] == 2.0f && read[options.dim + 1] == 1.0f);
  CHECK_EQ(table.Size(kStream), 3);
  CHECK(table.Stats(kStream).arena_bytes < 3 << 20);
}

void ClearForgetsWeightDecay() {
  for (const bool use_hashtable : {true, false}) {
    TableOptions options;
    options.name = "t";
    options.dim = 4;
    options.initializer.kind = InitializerKind::kConstant;
    options.initializer.a = 1.0f;
    options.use_hashtable = use_hashtable;
    options.max_capacity = 10;
    cuda::CudaTable table(options);
    OptimizerOptions sgd;
    sgd.weight_decay = 0.1f;
    const std::vector<uint64_t> keys = {1}, other = {2};
    const std::vector<float> grads(4, 0.0f);
    std::vector<float> row(4);
    for (int step = 1; step <= 10; ++step) {
      cuda::ApplyGradients(kStream, {{&table, keys.data(), grads.data(), 1}}, sgd, 1.0f, step);
    }
    table.Find(kStream, other.data(), 1, row.data(), nullptr);
    CHECK(row[0] < 0.36f);
    table.Clear(kStream);
    for (const std::vector<uint64_t>& key : {keys, other}) {
      table.Find(kStream, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
      table.FindOrInsert(kStream, key.data(), 1, row.data(), nullptr);
      CHECK_EQ(row[0], 1.0f);
    }
    CHECK_EQ(table.InitialRowScale(kStream), 1.0);
  }
}

}  // namespace
}  // namespace sok

int main() {
  emulator::host_arrays_allowed = emulator::runs_at_once = true;
  sok::EqualKeysTakeOneRow();
  sok::ClearForgetsWeightDecay();
}
