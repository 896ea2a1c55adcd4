// CRC-32 as zip files have it: of any part of a file, and of parts put together.
//
// A value can be extended over parts that are hashed in any order, because the CRC of A B is
// crc(A) * x^(bits of B) + crc(B), a sum of polynomials modulo P (CombineCrc32).
//
// On x86-64 the data is folded by carry-less multiplication, 64 bytes at a time: 16 bytes that lie
// D bits before others are replaced by their product with x^D mod P, added to those others. What is
// left in the end, 16 bytes, goes through a table, as all bytes do on other processors.
#ifndef SOK_CORE_CRC32_H_
#define SOK_CORE_CRC32_H_

#include <cstddef>
#include <cstdint>

namespace sok {

// `before`: the CRC of the bytes before these, 0 at the beginning.
uint32_t Crc32(uint32_t before, const void* data, size_t num_bytes);

// The CRC of bytes with CRC `first`, followed by `num_bytes` bytes with CRC `second`.
uint32_t CombineCrc32(uint32_t first, uint32_t second, uint64_t num_bytes);

}  // namespace sok

#endif  // SOK_CORE_CRC32_H_
