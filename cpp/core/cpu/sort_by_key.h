// Sorting by 64-bit keys.
#ifndef SOK_CORE_CPU_SORT_BY_KEY_H_
#define SOK_CORE_CPU_SORT_BY_KEY_H_

#include <algorithm>
#include <cstdint>

namespace sok {

// Sorts items [n] by key_of(item), a byte at a time from the lowest; bytes that all keys share are
// skipped. `scratch` is as long.
template <typename Item, typename KeyOf>
void SortByKey(Item* items, Item* scratch, int64_t n, KeyOf key_of) {
  Item *from = items, *to = scratch;
  for (int shift = 0; shift < 64; shift += 8) {
    int64_t places[257] = {};
    for (int64_t i = 0; i < n; ++i) ++places[(key_of(from[i]) >> shift & 255) + 1];
    if (std::find(places, places + 257, n) != places + 257) continue;
    for (int i = 0; i < 256; ++i) places[i + 1] += places[i];
    for (int64_t i = 0; i < n; ++i) to[places[key_of(from[i]) >> shift & 255]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::copy_n(from, n, items);
}

}  // namespace sok

#endif  // SOK_CORE_CPU_SORT_BY_KEY_H_
