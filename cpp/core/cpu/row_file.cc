#include "cpp/core/cpu/row_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <stdexcept>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>
#endif

namespace sok {
namespace {

constexpr size_t kSegmentChunks = 256;
constexpr int64_t kFetchBytes = int64_t{128} << 10;     // the system truncates longer requests
constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // of madvise; older headers lack them

std::string Where(const StorageOptions& storage, const std::string& table) {
  return "storage_path='" + storage.path + "' (table '" + table + "')";
}

}  // namespace

#if defined(__linux__)

namespace {

bool IsInMemory(int file) {
  constexpr int64_t kTmpfs = 0x01021994, kRamfs = 0x858458f6;
  struct statfs info;
  if (fstatfs(file, &info) != 0) return false;
  return static_cast<int64_t>(info.f_type) == kTmpfs || static_cast<int64_t>(info.f_type) == kRamfs;
}

// A file without a name. If the file system does not support that, it has a name for a moment.
int OpenScratch(const std::string& directory) {
  const int file = open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = directory + "/sok-rows-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

}  // namespace

int64_t RowBlockBytes() {
  static const int64_t bytes = std::max<int64_t>(4096, sysconf(_SC_PAGESIZE));
  return bytes;
}

RowFile::RowFile(const StorageOptions& storage, const std::string& table, int64_t chunk_bytes)
    : storage_(storage),
      table_(table),
      chunk_bytes_((chunk_bytes + RowBlockBytes() - 1) / RowBlockBytes() * RowBlockBytes()) {
  std::error_code ignored;  // opening the file will fail too
  std::filesystem::create_directories(storage.path, ignored);
  file_ = OpenScratch(storage.path);
  if (file_ < 0) {
    throw std::invalid_argument(
        "`storage_path` must be a writable directory, or one that can be created. Received: " +
        Where(storage, table) + ": " + std::strerror(errno));
  }
  if (IsInMemory(file_)) {
    close(file_);
    throw std::invalid_argument(
        "`storage_path` must be on a disk, not on a file system in memory. Received: " +
        Where(storage, table));
  }
}

RowFile::~RowFile() {
  for (char* segment : segments_) munmap(segment, kSegmentChunks * chunk_bytes_);
  if (file_ >= 0) close(file_);
}

void RowFile::Fail(const char* what, int error) const {
  throw std::runtime_error(std::string("Rows could not be ") + what + ": " + std::strerror(error) +
                           ". Received: " + Where(storage_, table_));
}

char* RowFile::Address(size_t chunk) const {
  return segments_[chunk / kSegmentChunks] + (chunk % kSegmentChunks) * chunk_bytes_;
}

// Calls fn(address, bytes) with each part of a range that lies in one mapping.
template <typename Fn>
void RowFile::ForMapped(int64_t offset, int64_t bytes, Fn fn) const {
  const int64_t end = offset + bytes;
  const int64_t segment_bytes = static_cast<int64_t>(kSegmentChunks) * chunk_bytes_;
  while (offset < end) {
    const int64_t size = std::min(end, (offset / segment_bytes + 1) * segment_bytes) - offset;
    fn(segments_[offset / segment_bytes] + offset % segment_bytes, static_cast<size_t>(size));
    offset += size;
  }
}

float* RowFile::AddChunk(size_t chunk) {
  const auto refuse = [this](const std::string& why) {
    throw std::length_error("A table needs " + std::to_string(bytes() + chunk_bytes_) +
                            " bytes for its rows on disk: " + why +
                            ". Received: " + Where(storage_, table_));
  };
  if (storage_.file_bytes > 0 && bytes() + chunk_bytes_ > storage_.file_bytes) {
    refuse("storage_size allows " + std::to_string(storage_.file_bytes));
  }
  while (segments_.size() <= chunk / kSegmentChunks) {
    segments_.reserve(segments_.size() + 1);
    void* const segment = mmap(nullptr, kSegmentChunks * chunk_bytes_, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (segment == MAP_FAILED) throw std::bad_alloc();
    segments_.push_back(static_cast<char*>(segment));
  }
  const int64_t offset = static_cast<int64_t>(chunk) * chunk_bytes_;
  const int error = posix_fallocate(file_, offset, chunk_bytes_);
  if (error != 0) {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, chunk_bytes_);
    refuse(std::strerror(error));
  }
  void* const at = mmap(Address(chunk), chunk_bytes_, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, file_, offset);
  if (at == MAP_FAILED) {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, chunk_bytes_);
    throw std::bad_alloc();
  }
  madvise(at, chunk_bytes_, MADV_RANDOM);    // no readahead: neighbours are no likelier to be used
  madvise(at, chunk_bytes_, MADV_DONTFORK);  // a forked process must not share the rows
  ++num_chunks_;
  return static_cast<float*>(at);
}

void RowFile::FreeChunk(size_t chunk) noexcept {
  mmap(Address(chunk), chunk_bytes_, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<int64_t>(chunk) * chunk_bytes_, chunk_bytes_);
  --num_chunks_;
}

void RowFile::Fetch(int64_t offset, int64_t bytes) const {
  for (int64_t end = offset + bytes; offset < end; offset += kFetchBytes) {
    posix_fadvise(file_, offset, std::min(kFetchBytes, end - offset), POSIX_FADV_WILLNEED);
  }
}

void RowFile::Map(int64_t offset, int64_t bytes, bool writes) const {
  const int advice = writes ? kPopulateWrite : kPopulateRead;
  ForMapped(offset, bytes, [this, advice](char* at, size_t size) {
    // EINVAL: Linux before 5.14. There each page is mapped when it is first used.
    if (madvise(at, size, advice) != 0 && errno != EINVAL) Fail("read", errno);
  });
}

void RowFile::Unmap(int64_t offset, int64_t bytes) const {
  ForMapped(offset, bytes, [](char* at, size_t size) { madvise(at, size, MADV_DONTNEED); });
}

void RowFile::CheckWritten() const {
  // For a range without pages: it waits for nothing and reports any page whose write failed.
  if (sync_file_range(file_, bytes(), 1, SYNC_FILE_RANGE_WAIT_BEFORE) != 0) Fail("written", errno);
}

#else

int64_t RowBlockBytes() { return 4096; }

RowFile::RowFile(const StorageOptions& storage, const std::string& table, int64_t)
    : chunk_bytes_(0) {
  throw std::invalid_argument("Rows on disk need Linux. Received: " + Where(storage, table));
}
RowFile::~RowFile() = default;
void RowFile::Fail(const char* what, int) const { throw std::runtime_error(what); }
char* RowFile::Address(size_t) const { return nullptr; }
float* RowFile::AddChunk(size_t) { throw std::bad_alloc(); }
void RowFile::FreeChunk(size_t) noexcept {}
void RowFile::Fetch(int64_t, int64_t) const {}
void RowFile::Map(int64_t, int64_t, bool) const {}
void RowFile::Unmap(int64_t, int64_t) const {}
void RowFile::CheckWritten() const {}

#endif

}  // namespace sok
