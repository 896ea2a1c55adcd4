// The vectorised path against the element-wise definition, and Philox against published vectors.
// The distributions are judged in Python.
#include "cpp/core/initializer.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cpp/core/hash.h"
#include "cpp/tests/check.h"

namespace sok {
namespace {

void PhiloxKnownAnswers() {
  // The three vectors for philox4x32 with 10 rounds in Random123's kat_vectors.
  struct Case {
    PhiloxBlock counter;
    uint32_t key0, key1;
    PhiloxBlock expected;
  };
  const Case cases[] = {
      {{{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0xa4093822,
       0x299f31d0,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Case& c : cases) {
    const PhiloxBlock block = Philox(c.counter, c.key0, c.key1);
    for (int i = 0; i < 4; ++i) CHECK_EQ(block.x[i], c.expected.x[i]);
  }
}

void RowsAreElements(InitializerKind kind) {
  const std::vector<uint64_t> keys = {0, ~0ull, 1, 77, 1ull << 63, 0x123456789ABCDEFull, 3, 4, 5};
  for (int64_t dim : {1, 3, 4, 5, 16, 63, 100}) {
    InitializerOptions options;
    options.kind = kind;
    options.a = -0.5f;
    options.b = 0.75f;
    options.default_rows.resize(7 * dim);
    for (size_t i = 0; i < options.default_rows.size(); ++i) options.default_rows[i] = 0.1f * i;
    const Initializer init = MakeInitializer(options, 42, HashName("t", 1), dim);
    std::vector<float> rows(keys.size() * dim + 1, -99.0f);
    std::vector<float*> pointers;
    for (size_t i = 0; i < keys.size(); ++i) pointers.push_back(rows.data() + i * dim);
    InitialRows(init, keys.data(), static_cast<int64_t>(keys.size()), dim, pointers.data());
    std::vector<float> single(dim);
    for (size_t i = 0; i < keys.size(); ++i) {
      float* const row = single.data();
      InitialRows(init, &keys[i], 1, dim, &row);
      for (int64_t c = 0; c < dim; ++c) {
        const float element = InitialElement(init, keys[i], static_cast<uint32_t>(c), dim);
        CHECK(std::memcmp(&element, &pointers[i][c], sizeof element) == 0);
        CHECK(std::memcmp(&element, &single[c], sizeof element) == 0);
      }
    }
    CHECK_EQ(rows.back(), -99.0f);
  }
}

void LogarithmAndBoxMullerAgreeWithLibm() {
  for (uint32_t i = 1; i <= 1u << 24; i += 37) {
    const float x = static_cast<float>(i) * 0x1p-24f;
    const double expected = std::log(static_cast<double>(x));
    CHECK(std::abs(LogOf(x) - expected) <= 2e-7 * std::abs(expected));
  }
  uint32_t bits = 1;
  for (int i = 0; i < 300000; ++i) {
    const uint32_t bits0 = bits = bits * 1664525u + 1013904223u;
    const uint32_t bits1 = bits = bits * 1664525u + 1013904223u;
    float z0, z1;
    NormalPair(bits0, bits1, &z0, &z1);
    const double radius = std::sqrt(-2 * std::log(((bits0 >> 8) + 1.0) * 0x1p-24));
    const double angle = 2 * 3.14159265358979323846 * bits1 * 0x1p-32;
    CHECK(std::abs(z0 - radius * std::cos(angle)) < 3e-6);
    CHECK(std::abs(z1 - radius * std::sin(angle)) < 3e-6);
  }
}

void UniformStaysBelowItsEnd() {
  InitializerOptions options;
  options.a = 1.0f;
  options.b = std::nextafter(1.0f, 2.0f);  // one value in [a, b)
  const Initializer init = MakeInitializer(options, 0, 0, 1);
  for (uint32_t bits : {0u, 0x80000000u, 0xFFFFFFFFu}) CHECK_EQ(UniformValue(init, bits), 1.0f);
}

}  // namespace
}  // namespace sok

int main() {
  using sok::InitializerKind;
  sok::PhiloxKnownAnswers();
  for (InitializerKind kind :
       {InitializerKind::kConstant, InitializerKind::kUniform, InitializerKind::kNormal,
        InitializerKind::kTruncatedNormal, InitializerKind::kDefaultRows}) {
    sok::RowsAreElements(kind);
  }
  sok::LogarithmAndBoxMullerAgreeWithLibm();
  sok::UniformStaysBelowItsEnd();
}
