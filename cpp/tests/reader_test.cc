// Reading a table in parts: all keys, ascending, over several walks through the index, of one
// instant while another thread waits to write.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "cpp/core/cpu/table.h"
#include "cpp/core/hash.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

TableOptions Options() {
  TableOptions options;
  options.name = "read";
  options.dim = 1;
  return options;
}

// More keys than two walks list.
void TestKeysOfSeveralWalks() {
  ThreadPool threads(2);
  constexpr int64_t kKeys = 9'500'000, kPart = 1'000'003;
  CpuTable table(Options());
  table.Reserve(threads, kKeys);
  std::vector<uint64_t> keys(kKeys);
  std::vector<float> rows(kKeys);
  for (int64_t i = 0; i < kKeys; ++i) {
    keys[i] = HashKey(static_cast<uint64_t>(i));  // which no two keys share
    rows[i] = static_cast<float>(keys[i] % 1000);
  }
  table.Assign(threads, keys.data(), kKeys, rows.data());
  std::sort(keys.begin(), keys.end());

  const std::unique_ptr<TableReader> reader = table.OpenContent(threads, true);
  CHECK(reader->num_keys() == kKeys);
  std::vector<uint64_t> part(kPart);
  std::vector<float> read(kPart);
  for (int64_t begin = 0; begin < kKeys; begin += kPart) {
    const int64_t n = std::min(kPart, kKeys - begin);
    reader->ReadKeys(threads, n, part.data());
    CHECK(std::equal(part.begin(), part.begin() + n, keys.begin() + begin));
    reader->ReadRows(threads, begin, part.data(), n, read.data(), nullptr, nullptr);
    bool same = true;
    for (int64_t i = 0; i < n; ++i) same &= read[i] == static_cast<float>(part[i] % 1000);
    CHECK(same);
  }
}

void TestWritersWaitAndReadersDoNot() {
  InlineExecutor inline_executor;
  CpuTable table(Options());
  const uint64_t key = 5;
  float row = 1.0f;
  table.Assign(inline_executor, &key, 1, &row);
  std::unique_ptr<TableReader> reader = table.OpenContent(inline_executor, true);
  std::atomic<bool> written{false};
  std::thread writer([&] {
    InlineExecutor own;
    const float other = 2.0f;
    table.Assign(own, &key, 1, &other);
    written = true;
  });
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    table.Find(inline_executor, &key, 1, &row, nullptr);
    CHECK(row == 1.0f && !written);
  }
  uint64_t found = 0;
  reader->ReadKeys(inline_executor, 1, &found);
  reader->ReadRows(inline_executor, 0, &found, 1, &row, nullptr, nullptr);
  CHECK(found == 5 && row == 1.0f);
  std::thread closer([&] { reader.reset(); });  // another thread may end it
  closer.join();
  writer.join();
  table.Find(inline_executor, &key, 1, &row, nullptr);
  CHECK(row == 2.0f);
}

}  // namespace
}  // namespace sok

int main() {
  sok::TestKeysOfSeveralWalks();
  sok::TestWritersWaitAndReadersDoNot();
}
