#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/lookup/segments.h"

namespace sok {
namespace cuda {
namespace {

constexpr int kPerThread = 8;

// Words as a kernel argument, which CUDA copies before the launch returns. A copy from pageable
// memory would have to be waited for.
struct ArgumentWords {
  static constexpr size_t kMost = 448;  // 3.5 of the 4 KiB that arguments may take
  uint64_t words[kMost];
};

__global__ void __launch_bounds__(kThreads)
    StoreKernel(const __grid_constant__ ArgumentWords values, int64_t count, uint64_t* to) {
  const int64_t i = GlobalThread();
  if (i < count) to[i] = values.words[i];
}

// Words of T that begin the argument, as words of 8 bytes.
template <typename T>
SOK_HD size_t InArgument(size_t num_words) {
  return (num_words * sizeof(T) + 7) / 8;
}

// Of the values, `num_words` words, then the targets they go to.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    StoreInBlocksKernel(const __grid_constant__ ArgumentWords values, int64_t num_words,
                        int64_t num_targets, T* message) {
  const int64_t i = GlobalThread();
  if (i >= num_words * num_targets) return;
  const int64_t block = i / num_words, word = i - block * num_words;
  const uint64_t target = values.words[InArgument<T>(num_words) + block];
  message[target + word] = reinterpret_cast<const T*>(values.words)[word];
}

// Pinned memory that words leave for the device from. A piece is used again once its stream has
// read it, so that nobody waits: there are as many as are under way at once.
class StagedCopies {
 public:
  static StagedCopies& OfCurrentDevice() {
    static std::mutex mutex;
    static auto* const of_device = new std::map<int, StagedCopies>;  // never freed, as the pools
    const std::lock_guard<std::mutex> lock(mutex);
    return (*of_device)[CurrentDevice()];
  }
  void Copy(Stream stream, const void* from, size_t bytes, void* to) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Piece& piece = FreePiece(bytes);
    std::memcpy(piece.memory.as<char>(), from, bytes);
    CudaCheck(cudaMemcpyAsync(to, piece.memory.as<char>(), bytes, cudaMemcpyHostToDevice, stream),
              "cudaMemcpyAsync");
    piece.read.Record(stream);
  }

 private:
  struct Piece {
    explicit Piece(size_t bytes) : memory(bytes) {}
    HostBuffer memory;
    StreamPoint read;
  };

  Piece& FreePiece(size_t bytes) {
    const uint64_t round = StreamPoint::NextRound();
    for (const auto& piece : pieces_) {
      if (piece->memory.bytes() >= bytes && piece->read.HasPassed(round)) return *piece;
    }
    size_t room = size_t{64} << 10;
    while (room < bytes) room *= 2;
    pieces_.push_back(std::make_unique<Piece>(room));
    return *pieces_.back();
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Piece>> pieces_;
};

// Where the blocks of a message begin, and where the last one ends.
struct BlockBegins {
  static constexpr int64_t kMost = 448;
  int64_t begin[kMost];
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    HeadsKernel(const __grid_constant__ BlockBegins blocks, int64_t num_blocks, int64_t num_words,
                const T* message, T* heads) {  // in pinned memory
  const int64_t i = GlobalThread();
  if (i >= num_blocks * num_words) return;
  const int64_t block = i / num_words;
  const int64_t from = blocks.begin[block] + (i - block * num_words);
  heads[i] = from < blocks.begin[block + 1] ? message[from] : T{0};
}

using Segment = SegmentList::Segment;

// The last segment that begins at or before element i.
SOK_DEVICE int64_t SegmentOf(const Segment* segments, int64_t num_segments, int64_t i) {
  int64_t low = 0, high = num_segments;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].begin <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename T>
SOK_DEVICE void MoveWord(const Segment& segment, int64_t at) {
  static_cast<T*>(segment.to)[at] = reinterpret_cast<const T*>(segment.from)[at];
}

// A block takes kPerThread stretches of kThreads elements; a thread searches once, then steps on.
__global__ void __launch_bounds__(kThreads)
    SegmentsKernel(const Segment* segments, int64_t num_segments, int64_t num_elements) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads * kPerThread + threadIdx.x;
  if (i >= num_elements) return;
  int64_t s = SegmentOf(segments, num_segments, i);
  for (int u = 0; u < kPerThread && i < num_elements; ++u, i += kThreads) {
    while (s + 1 < num_segments && segments[s + 1].begin <= i) ++s;
    const Segment segment = segments[s];
    const int64_t at = i - segment.begin;
    if (segment.kind == SegmentList::kWords4) {
      MoveWord<uint32_t>(segment, at);
    } else if (segment.kind == SegmentList::kWords8) {
      MoveWord<uint64_t>(segment, at);
    } else {
      static_cast<int64_t*>(segment.to)[at] =
          static_cast<int64_t>(segment.from) + at * segment.kind;
    }
  }
}

}  // namespace

void UploadWords(Stream stream, const void* words, size_t num_words, uint64_t* to) {
  const size_t bytes = num_words * sizeof(uint64_t);
  if (num_words > ArgumentWords::kMost) {
    return StagedCopies::OfCurrentDevice().Copy(stream, words, bytes, to);
  }
  ArgumentWords values = {};
  std::memcpy(values.words, words, bytes);
  const int64_t count = static_cast<int64_t>(num_words);
  Launch(StoreKernel, count, stream, values, count, to);
}

template <typename T>
void StoreInBlocks(Stream stream, const T* words, size_t num_words,
                   const std::vector<int64_t>& targets, T* message) {
  const size_t first_target = InArgument<T>(num_words), most = ArgumentWords::kMost - first_target;
  for (size_t first = 0; first < targets.size(); first += most) {
    const size_t count = std::min(most, targets.size() - first);
    ArgumentWords values = {};
    std::memcpy(values.words, words, num_words * sizeof(T));
    std::memcpy(values.words + first_target, targets.data() + first, count * sizeof(uint64_t));
    Launch(StoreInBlocksKernel<T>, static_cast<int64_t>(num_words * count), stream, values,
           static_cast<int64_t>(num_words), static_cast<int64_t>(count), message);
  }
}
template void StoreInBlocks<float>(Stream, const float*, size_t, const std::vector<int64_t>&,
                                   float*);
template void StoreInBlocks<uint64_t>(Stream, const uint64_t*, size_t, const std::vector<int64_t>&,
                                      uint64_t*);

void SegmentList::Add(int64_t count, uint64_t from, void* to, int64_t kind) {
  if (count == 0) return;
  segments_.push_back({num_elements_, from, to, kind});
  num_elements_ += count;
}

int64_t SegmentList::Keep(const int64_t* words, int64_t num_words) {
  const int64_t place = static_cast<int64_t>(kept_.size());
  kept_.insert(kept_.end(), words, words + num_words);
  return place;
}

void SegmentList::Run(Stream stream, Workspace& workspace) {
  if (num_elements_ == 0) return;
  const Workspace::Scope scope(workspace, stream);
  const size_t list_words = segments_.size() * (sizeof(Segment) / sizeof(uint64_t));
  uint64_t* const there = workspace.Take<uint64_t>(static_cast<int64_t>(list_words + kept_.size()));
  for (const size_t s : from_kept_) {
    segments_[s].from += reinterpret_cast<uint64_t>(there + list_words);
  }
  std::vector<uint64_t> words(list_words + kept_.size());
  std::memcpy(words.data(), segments_.data(), list_words * sizeof(uint64_t));
  std::copy(kept_.begin(), kept_.end(), words.begin() + static_cast<std::ptrdiff_t>(list_words));
  UploadWords(stream, words.data(), words.size(), there);
  Launch(SegmentsKernel, (num_elements_ + kPerThread - 1) / kPerThread, stream,
         reinterpret_cast<const Segment*>(there), static_cast<int64_t>(segments_.size()),
         num_elements_);
}

template <typename T>
std::vector<T> Heads(Stream stream, const T* message, const int32_t* lengths, int64_t num_blocks,
                     int64_t num_words) {
  const size_t num_heads = static_cast<size_t>(num_blocks * num_words);
  const PinnedPiece piece(num_heads * sizeof(T));
  T* const there = piece.as<T>();
  int64_t end = 0;
  for (int64_t first = 0; first < num_blocks; first += BlockBegins::kMost - 1) {
    const int64_t count = std::min(num_blocks - first, BlockBegins::kMost - 1);
    BlockBegins blocks = {};
    blocks.begin[0] = end;
    for (int64_t b = 0; b < count; ++b) blocks.begin[b + 1] = end += lengths[first + b];
    Launch(HeadsKernel<T>, count * num_words, stream, blocks, count, num_words, message,
           there + first * num_words);
  }
  Synchronize(stream);
  return std::vector<T>(there, there + num_heads);
}

template std::vector<int64_t> Heads<int64_t>(Stream, const int64_t*, const int32_t*, int64_t,
                                             int64_t);
template std::vector<float> Heads<float>(Stream, const float*, const int32_t*, int64_t, int64_t);

}  // namespace cuda
}  // namespace sok
