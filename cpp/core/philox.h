// Philox4x32-10: random numbers as a function of a counter.
//
// A generator without state: 128 bits of counter and 64 bits of key give 128 random bits. So any
// number of any stream can be computed directly, in any order, on any device. From Salmon, Moraes,
// Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#ifndef SOK_CORE_PHILOX_H_
#define SOK_CORE_PHILOX_H_

#include <cstdint>

#include "cpp/core/platform.h"

namespace sok {

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u;
inline constexpr uint32_t kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u;  // golden ratio
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85u;  // sqrt(3) - 1
inline constexpr int kPhiloxRounds = 10;

struct PhiloxBlock {
  uint32_t x[4];
};

SOK_HD inline PhiloxBlock Philox(PhiloxBlock c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMul0} * c.x[0];
    const uint64_t product1 = uint64_t{kPhiloxMul1} * c.x[2];
    c = PhiloxBlock{
        {static_cast<uint32_t>(product1 >> 32) ^ c.x[1] ^ key0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c.x[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return c;
}

}  // namespace sok

#endif  // SOK_CORE_PHILOX_H_
