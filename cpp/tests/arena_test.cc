#include "cpp/core/cpu/arena.h"

#include <cstdint>
#include <set>

#include "cpp/tests/check.h"

namespace sok {
namespace {

void StrideFollowsTheRule() {
  struct Case {
    int64_t row_floats, stride;
  };
  // To 16 floats (64 bytes) where at most an eighth is lost, else to 4 floats (16 bytes).
  for (const Case& c :
       {Case{1, 4}, Case{4, 4}, Case{5, 8}, Case{14, 16}, Case{13, 16}, Case{16, 16}, Case{17, 20},
        Case{28, 32}, Case{27, 28}, Case{65, 68}, Case{113, 128}}) {
    CHECK_EQ(Arena(c.row_floats).stride(), c.stride);
  }
}

void RowsStayAndDoNotOverlap(int64_t row_floats, int64_t num_rows) {
  Arena arena(row_floats);
  arena.Reserve(1);
  float* const first = arena.Row(0);
  arena.Reserve(num_rows);
  CHECK(arena.Row(0) == first);
  for (int64_t r = 0; r < num_rows; ++r) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(arena.Row(static_cast<uint32_t>(r))) % 16, 0u);
    for (int64_t c = 0; c < row_floats; ++c) {
      arena.Row(static_cast<uint32_t>(r))[c] = static_cast<float>(r * 3 + c);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t c = 0; c < row_floats; ++c) {
      CHECK_EQ(arena.Row(static_cast<uint32_t>(r))[c], static_cast<float>(r * 3 + c));
    }
  }
  CHECK(arena.bytes() >= num_rows * row_floats * 4);
  arena.Clear();
  CHECK_EQ(arena.bytes(), 0);
}

void ChunksMayBeMissing() {
  Arena arena(16);
  const uint32_t far = static_cast<uint32_t>(5 * arena.chunk_rows() + 3);
  arena.ReserveRow(far);
  CHECK(arena.HasRow(far));
  CHECK(!arena.HasRow(0));
  CHECK_EQ(arena.bytes(), arena.chunk_rows() * 64);
  arena.Row(far)[15] = 1.0f;
  arena.FreeChunk(5);
  CHECK(!arena.HasRow(far));
  CHECK_EQ(arena.bytes(), 0);
}

}  // namespace
}  // namespace sok

int main() {
  sok::StrideFollowsTheRule();
  sok::RowsStayAndDoNotOverlap(3, 300000);
  sok::RowsStayAndDoNotOverlap(16, 100000);
  sok::RowsStayAndDoNotOverlap(700001, 3);  // wider than a chunk
  sok::ChunksMayBeMissing();
}
