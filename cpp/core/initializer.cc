#include "cpp/core/initializer.h"

#include <algorithm>
#include <limits>

#include "cpp/core/hash.h"

namespace sok {
namespace {

// Philox blocks worked on together. Small rows fill the lanes with several keys, wide ones with
// several blocks of one key.
constexpr int kLanes = 16;

struct Lanes {
  uint32_t x[4][kLanes];
};

void PhiloxLanes(Lanes* lanes, uint32_t key0, uint32_t key1) {
  Lanes c = *lanes;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t product0 = uint64_t{kPhiloxMul0} * c.x[0][i];
      const uint64_t product1 = uint64_t{kPhiloxMul1} * c.x[2][i];
      const uint32_t x1 = c.x[1][i], x3 = c.x[3][i];
      c.x[0][i] = static_cast<uint32_t>(product1 >> 32) ^ x1 ^ key0;
      c.x[1][i] = static_cast<uint32_t>(product1);
      c.x[2][i] = static_cast<uint32_t>(product0 >> 32) ^ x3 ^ key1;
      c.x[3][i] = static_cast<uint32_t>(product0);
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  *lanes = c;
}

struct Item {
  uint64_t key;
  uint32_t block;
  float* out;  // column 4 * block of the row
  int count;   // columns of this block, 1..4
};

// Fills up to kLanes blocks. Lanes past `num_items` hold leftovers that nothing reads.
void FillItems(const Initializer& init, const Item* items, int num_items, Lanes* lanes) {
  for (int i = 0; i < num_items; ++i) {
    lanes->x[0][i] = static_cast<uint32_t>(items[i].key);
    lanes->x[1][i] = static_cast<uint32_t>(items[i].key >> 32);
    lanes->x[2][i] = items[i].block;
    lanes->x[3][i] = 0;
  }
  PhiloxLanes(lanes, init.philox_key0, init.philox_key1);
  alignas(64) float values[4][kLanes];
  if (init.kind == InitializerKind::kUniform) {
    for (int w = 0; w < 4; ++w) {
      for (int i = 0; i < kLanes; ++i) values[w][i] = UniformValue(init, lanes->x[w][i]);
    }
  } else {
    for (int w = 0; w < 4; w += 2) {
      for (int i = 0; i < kLanes; ++i) {
        NormalPair(lanes->x[w][i], lanes->x[w + 1][i], &values[w][i], &values[w + 1][i]);
      }
    }
    if (init.kind == InitializerKind::kTruncatedNormal) {
      for (int w = 0; w < 4; ++w) {
        for (int i = 0; i < num_items; ++i) {
          if (values[w][i] > -2.0f && values[w][i] < 2.0f) continue;
          values[w][i] = TruncatedNormal(init, items[i].key, items[i].block * 4 + w, 1);
        }
      }
    }
    for (int w = 0; w < 4; ++w) {
      for (int i = 0; i < kLanes; ++i) values[w][i] = init.a + init.scale * values[w][i];
    }
  }
  for (int i = 0; i < num_items; ++i) {
    const float row[4] = {values[0][i], values[1][i], values[2][i], values[3][i]};
    if (items[i].count == 4) {
      std::memcpy(items[i].out, row, sizeof row);
    } else {
      std::copy_n(row, items[i].count, items[i].out);
    }
  }
}

}  // namespace

Initializer MakeInitializer(const InitializerOptions& options, uint64_t seed,
                            uint64_t table_name_hash, int64_t dim) {
  Initializer init;
  init.kind = options.kind;
  init.a = options.a;
  init.scale = options.kind == InitializerKind::kUniform ? options.b - options.a : options.b;
  init.limit =
      std::max(options.a, std::nextafter(options.b, -std::numeric_limits<float>::infinity()));
  const uint64_t stream = HashKey(HashKey(seed + 0x9E3779B97F4A7C15ull) ^ table_name_hash);
  init.philox_key0 = static_cast<uint32_t>(stream);
  init.philox_key1 = static_cast<uint32_t>(stream >> 32);
  if (options.kind == InitializerKind::kDefaultRows) {
    init.default_rows = options.default_rows.data();
    init.num_default_rows = options.default_rows.size() / static_cast<size_t>(dim);
  }
  return init;
}

void InitialRow(const InitializerOptions& options, uint64_t seed, uint64_t table_name_hash,
                uint64_t key, int64_t dim, float* out) {
  InitialRows(MakeInitializer(options, seed, table_name_hash, dim), &key, 1, dim, &out);
}

void InitialRows(const Initializer& init, const uint64_t* keys, int64_t num_keys, int64_t dim,
                 float* const* rows) {
  if (init.kind == InitializerKind::kConstant) {
    for (int64_t i = 0; i < num_keys; ++i) std::fill_n(rows[i], dim, init.a);
    return;
  }
  if (init.kind == InitializerKind::kDefaultRows) {
    for (int64_t i = 0; i < num_keys; ++i) {
      std::copy_n(init.default_rows + (keys[i] % init.num_default_rows) * dim, dim, rows[i]);
    }
    return;
  }
  Item items[kLanes];
  Lanes lanes = {};
  int num_items = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    for (int64_t column = 0; column < dim; column += 4) {
      items[num_items++] = {keys[i], static_cast<uint32_t>(column / 4), rows[i] + column,
                            static_cast<int>(std::min<int64_t>(4, dim - column))};
      if (num_items == kLanes) {
        FillItems(init, items, num_items, &lanes);
        num_items = 0;
      }
    }
  }
  if (num_items > 0) FillItems(init, items, num_items, &lanes);
}

}  // namespace sok
