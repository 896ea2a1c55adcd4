// RowFile: the chunks of an arena as parts of a file, mapped into memory.
//
//     file     | chunk 0 | chunk 1 | ... |       without a name: it disappears with the process,
//                   |         |                  even after a crash
//     address  | segment: 256 chunks      |  | segment | ...       reserved at once, so that the
//                                                                  chunks of one are one mapping
//
// A row is read and written at its address; the system fetches what is not in memory. So the file
// changes no result. RowCache decides what the process keeps in memory; beyond that, the system's
// page cache holds what fits into free memory.
//
// Invariant: a mapped chunk has its space on the disk. A full disk is an error when a table grows,
// never when a row is accessed.
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
  // Makes the directory if it is missing. Throws std::invalid_argument if no file can be made there
  // or its file system is in memory. `chunk_bytes` is rounded up to whole blocks.
  RowFile(const StorageOptions& storage, const std::string& table, int64_t chunk_bytes);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  int64_t chunk_bytes() const { return chunk_bytes_; }
  int64_t bytes() const { return num_chunks_ * chunk_bytes_; }  // on the disk

  // A chunk of zeros. Throws std::length_error if the disk or `storage.file_bytes` is full, and
  // std::bad_alloc if no addresses are left.
  float* AddChunk(size_t chunk);
  void FreeChunk(size_t chunk) noexcept;

  // For a range of whole blocks of chunks that exist. Fetch begins to read and returns at once. Map
  // returns when the range is in memory and mapped; throws std::runtime_error if the disk fails.
  void Fetch(int64_t offset, int64_t bytes) const;
  void Map(int64_t offset, int64_t bytes, bool writes) const;
  // The range no longer counts as memory of the process. The system writes changed blocks to disk
  // and keeps the range in its page cache while memory is free.
  void Unmap(int64_t offset, int64_t bytes) const;
  // Throws std::runtime_error if the system failed to write a block since the last call.
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

// The unit of reading, writing and caching: a page, at least 4 KiB.
int64_t RowBlockBytes();

}  // namespace sok

#endif  // SOK_CORE_CPU_ROW_FILE_H_
