// RowFile: the chunks of an arena as parts of a file, mapped into memory.
//
//     file     | chunk 0 | chunk 1 | ... |       without a name: it goes with the process, however
//                   |         |                  that ends
//     address  | segment: 256 chunks      |  | segment | ...       reserved at once, so that the
//                                                                  chunks of one are one mapping
//
// Whoever has a row's address reads and writes the row there; the system fetches what is not in
// memory. So the file changes no result. What the process has in memory is decided in row_cache.h;
// beyond that the system's page cache holds what fits into memory that nobody else needs.
//
// Invariant: a chunk that is mapped has its space on the disk. A full disk is an error where a table
// grows, never at an address.
#ifndef SOK_CORE_CPU_ROW_FILE_H_
#define SOK_CORE_CPU_ROW_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpp/core/table_options.h"

namespace sok {

class RowFile {
 public:
  // Makes the directory where it is missing. Throws std::invalid_argument where no file can be
  // made there. `chunk_bytes` is rounded up to whole blocks.
  RowFile(const StorageOptions& storage, const std::string& table, int64_t chunk_bytes);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  int64_t chunk_bytes() const { return chunk_bytes_; }
  int64_t bytes() const { return num_chunks_ * chunk_bytes_; }  // on the disk

  // Zeros at first. Throws std::length_error where the disk or `storage.file_bytes` is full, and
  // std::bad_alloc where addresses are.
  float* AddChunk(size_t chunk);
  void FreeChunk(size_t chunk) noexcept;

  // Of a range of whole blocks in [0, num_chunks * chunk_bytes). Fetch returns at once, Map when the
  // range is in memory and addresses lead there. They throw std::runtime_error where the disk fails.
  void Fetch(int64_t offset, int64_t bytes) const;
  void Map(int64_t offset, int64_t bytes, bool writes) const;
  // The range no longer counts as memory of the process. The system writes what was changed, and
  // keeps the rest as long as nobody else needs the memory.
  void Unmap(int64_t offset, int64_t bytes) const;
  // Throws std::runtime_error where the system could not write a block since the last call.
  void CheckWritten() const;

 private:
  char* Address(size_t chunk) const;
  template <typename Fn>
  void ForMapped(int64_t offset, int64_t bytes, Fn fn) const;
  [[noreturn]] void Fail(const char* what, int error) const;

  const StorageOptions storage_;
  const std::string table_;
  const int64_t chunk_bytes_;
  int file_ = -1;
  int64_t num_chunks_ = 0;
  std::vector<char*> segments_;
};

// What is read, written and kept in memory at a time: a page.
int64_t RowBlockBytes();

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_FILE_H_
