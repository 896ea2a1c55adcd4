// Find, insert and erase in the device index, by one thread among many.
//
//     state of a slot     empty --claim--> claimed, no row --publish--> present --erase--> erased
//       digest byte       0                digest           digest      1
//       row word          0                0                row + 1     0
//
// A probe visits buckets from the key's home on and ends at the first with an empty slot. An
// inserting thread that did not find its key claims the first empty slot of that bucket: it sets
// the digest byte by compare-and-swap of the word around it, then writes the key, then publishes
// the row number with release order. A thread that finds a claimed slot with its own digest and no
// row yet reads again: the key may be its own.
//
// Why a key is inserted once. Claimed slots stay claimed while a batch is inserted (erasing and
// rehashing are separate calls), so a full bucket stays full. Let A and B insert one key and claim
// slots a and b, a before b in probe order. B chose the first slot that it saw empty, so it saw a
// taken. Slot a was empty until A claimed it, hence B saw A's digest there, waited for A's row and
// found the key. The argument is about one word at a time. It needs neither one atomic read of all
// 16 digests nor up-to-date reads, since compare-and-swap fails on a word that has changed.
//
// Order of reads. The two words of a slot change once while a batch is inserted: the key word from
// 0 to the key, the row word from 0 to the row number plus one. So each is final once it is not 0,
// and both are loaded at once. Only a key word that reads 0 beside a row may be older than the row:
// then the row is read again with acquire order, and the key after it.
//
// Progress: a thread waits only for a thread between its claim and its publication, which waits for
// nobody.
//
// `Memory` is how words are read and written: device memory in bucket_memory.cuh; in tests, host
// memory with several threads, or with a second thread simulated between any two steps.
//
//     DigestWords Digests(const Bucket*)                     relaxed, never from a stale cache
//     uint32_t Row(const Bucket*, int slot)                  relaxed
//     uint64_t Key(const Bucket*, int slot)                  relaxed
//     uint64_t PublishedKey(const Bucket*, int slot)         the key of a slot whose row was seen
//     bool Claim(Bucket*, int word, uint32_t expected, uint32_t desired)      compare-and-swap
//     void Publish(Bucket*, int slot, uint64_t key, uint32_t row)             release
//     uint32_t TakeRow(Bucket*, int slot)                    swaps the row word with 0
//     void MarkErased(Bucket*, int slot)                     the byte is never 0 in between
#ifndef SOK_CORE_CUDA_INDEX_PROBE_H_
#define SOK_CORE_CUDA_INDEX_PROBE_H_

#include <cstdint>

#include "cpp/core/cuda/index/bucket.h"

namespace sok {
namespace cuda {

// Word `word` of 16 digests.
SOK_HD inline uint32_t WordOf(const DigestWords& digests, int word) {
  const uint64_t half = word < 2 ? digests.low : digests.high;
  return static_cast<uint32_t>((word & 1) != 0 ? half >> 32 : half);
}

// Row number of a key, or kNoRow. For kernels that only read: no other thread may insert.
template <typename Memory>
SOK_HD inline uint32_t FindRow(const Memory& memory, const IndexRef& index, uint64_t hash,
                               uint64_t key) {
  const uint8_t digest = HashDigest(hash);
  uint64_t step = 0;
  for (Bucket* bucket = index.Home(hash);; bucket = index.Next(bucket, &step)) {
    const DigestWords digests = memory.Digests(bucket);
    for (uint32_t match = MatchDigests(digests, digest); match != 0; match &= match - 1) {
      const int slot = SOK_CTZ(match);
      const uint32_t row = memory.Row(bucket, slot);
      if (memory.Key(bucket, slot) == key) return row - 1;
    }
    if (MatchDigests(digests, kEmptyDigest) != 0) return kNoRow;
  }
}

// Row number of a key. A missing key is inserted: new_row() is called once and *is_new is set. The
// caller has made room: at least one slot of the index stays empty.
template <typename Memory, typename NewRow>
SOK_HD inline uint32_t FindOrInsertRow(const Memory& memory, const IndexRef& index, uint64_t hash,
                                       uint64_t key, const NewRow& new_row, bool* is_new) {
  const uint8_t digest = HashDigest(hash);
  Bucket* bucket = index.Home(hash);
  uint64_t step = 0;
  uint32_t found = 0;  // row number + 1
  *is_new = false;
  while (found == 0) {
    const DigestWords digests = memory.Digests(bucket);
    bool unpublished = false;
    for (uint32_t match = MatchDigests(digests, digest); match != 0; match &= match - 1) {
      const int slot = SOK_CTZ(match);
      const uint32_t row = memory.Row(bucket, slot);
      uint64_t key_there = memory.Key(bucket, slot);
      if (row == 0) {
        unpublished = true;
        continue;
      }
      if (key_there == 0) key_there = memory.PublishedKey(bucket, slot);
      if (key_there == key) {
        found = row;
        break;
      }
    }
    if (found != 0 || unpublished) continue;  // found, or look at this bucket again
    const uint32_t empty = MatchDigests(digests, kEmptyDigest);
    if (empty == 0) {
      bucket = index.Next(bucket, &step);
      continue;
    }
    const int slot = SOK_CTZ(empty);
    const uint32_t word = WordOf(digests, slot / 4);
    const uint32_t byte = static_cast<uint32_t>(digest) << (slot % 4 * 8);  // the byte was 0
    // Claim and publication in one iteration: a thread that reads again never keeps the one it
    // waits for from progressing, whatever order the hardware runs them in.
    if (memory.Claim(bucket, slot / 4, word, word | byte)) {
      const uint32_t row = new_row();
      memory.Publish(bucket, slot, key, row + 1);
      *is_new = true;
      found = row + 1;
    }
  }
  return found - 1;
}

// Inserts a missing key that no other thread inserts: for rehashing.
template <typename Memory>
SOK_HD inline void InsertUniqueRow(const Memory& memory, const IndexRef& index, uint64_t hash,
                                   uint64_t key, uint32_t row) {
  const uint8_t digest = HashDigest(hash);
  Bucket* bucket = index.Home(hash);
  uint64_t step = 0;
  for (;;) {
    const DigestWords digests = memory.Digests(bucket);
    const uint32_t empty = MatchDigests(digests, kEmptyDigest);
    if (empty == 0) {
      bucket = index.Next(bucket, &step);
      continue;
    }
    const int slot = SOK_CTZ(empty);
    const uint32_t word = WordOf(digests, slot / 4);
    const uint32_t byte = static_cast<uint32_t>(digest) << (slot % 4 * 8);
    if (memory.Claim(bucket, slot / 4, word, word | byte)) {
      memory.Publish(bucket, slot, key, row + 1);
      return;
    }
  }
}

// Erases a key; returns the row number that it had, or kNoRow. Of threads that erase one key, one
// gets the row number. The slot is not used again until the index is rehashed.
template <typename Memory>
SOK_HD inline uint32_t EraseRow(const Memory& memory, const IndexRef& index, uint64_t hash,
                                uint64_t key) {
  const uint8_t digest = HashDigest(hash);
  uint64_t step = 0;
  for (Bucket* bucket = index.Home(hash);; bucket = index.Next(bucket, &step)) {
    const DigestWords digests = memory.Digests(bucket);
    for (uint32_t match = MatchDigests(digests, digest); match != 0; match &= match - 1) {
      const int slot = SOK_CTZ(match);
      // While its byte changes to 1 it may look like another digest; without a row it is ignored.
      if (memory.Row(bucket, slot) == 0 || memory.Key(bucket, slot) != key) continue;
      const uint32_t row = memory.TakeRow(bucket, slot);
      if (row == 0) return kNoRow;  // another thread erased it first
      memory.MarkErased(bucket, slot);
      return row - 1;
    }
    if (MatchDigests(digests, kEmptyDigest) != 0) return kNoRow;
  }
}

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_INDEX_PROBE_H_
