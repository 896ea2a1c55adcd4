// CRC-32 beside a computation bit by bit, for all short lengths and alignments, and put together.
#include "cpp/core/crc32.h"

#include <cstdint>
#include <vector>

#include "cpp/core/hash.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

uint32_t BitByBit(uint32_t before, const uint8_t* data, size_t num_bytes) {
  uint32_t state = ~before;
  for (size_t i = 0; i < num_bytes; ++i) {
    state ^= data[i];
    for (int bit = 0; bit < 8; ++bit) state = state >> 1 ^ ((state & 1) != 0 ? 0xEDB88320u : 0u);
  }
  return ~state;
}

void TestAllLengths(const std::vector<uint8_t>& data) {
  for (size_t begin = 0; begin < 4; ++begin) {
    for (size_t n = 0; n < 400; ++n) {
      const uint32_t before = static_cast<uint32_t>(n * 2654435761u);
      CHECK(Crc32(before, data.data() + begin, n) == BitByBit(before, data.data() + begin, n));
    }
  }
  CHECK(Crc32(0, "123456789", 9) == 0xCBF43926u);  // the value that every description names
}

void TestPartsPutTogether(const std::vector<uint8_t>& data) {
  const uint32_t whole = Crc32(0, data.data(), data.size());
  CHECK(whole == BitByBit(0, data.data(), data.size()));
  for (size_t cut : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{4097}, data.size()}) {
    const uint32_t first = Crc32(0, data.data(), cut);
    const uint32_t second = Crc32(0, data.data() + cut, data.size() - cut);
    CHECK(CombineCrc32(first, second, data.size() - cut) == whole);
    CHECK(Crc32(first, data.data() + cut, data.size() - cut) == whole);
  }
}

}  // namespace
}  // namespace sok

int main() {
  std::vector<uint8_t> data(100'003);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(sok::HashKey(i));
  sok::TestAllLengths(data);
  sok::TestPartsPutTogether(data);
}
