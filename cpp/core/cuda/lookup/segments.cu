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

// Of the values, `num_words` words, then the targets they go to.
__global__ void __launch_bounds__(kThreads)
    StoreInBlocksKernel(const __grid_constant__ ArgumentWords values, int64_t num_words,
                        int64_t num_targets, uint64_t* message) {
  const int64_t i = GlobalThread();
  if (i >= num_words * num_targets) return;
  const int64_t block = i / num_words, word = i - block * num_words;
  message[static_cast<int64_t>(values.words[num_words + block]) + word] = values.words[word];
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

// Segments as kernels see them: none is empty, so `begin` ascends.
template <typename T>
struct Piece {
  int64_t begin;  // number of its first element, counted over all segments
  const T* from;
  T* to;
};
struct RowPiece {
  int64_t begin;
  int64_t start;
  int64_t dim;
};

// The last piece that begins at or before element i.
template <typename P>
SOK_DEVICE int64_t PieceOf(const P* pieces, int64_t num_pieces, int64_t i) {
  int64_t low = 0, high = num_pieces;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (pieces[middle].begin <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A block takes kPerThread stretches of kThreads elements; a thread searches once, then steps on.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    MoveKernel(const Piece<T>* pieces, int64_t num_pieces, int64_t num_elements) {
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads * kPerThread + threadIdx.x;
  if (i >= num_elements) return;
  int64_t p = PieceOf(pieces, num_pieces, i);
  for (int u = 0; u < kPerThread && i < num_elements; ++u, i += kThreads) {
    while (p + 1 < num_pieces && pieces[p + 1].begin <= i) ++p;
    const int64_t at = i - pieces[p].begin;
    pieces[p].to[at] = pieces[p].from[at];
  }
}

__global__ void __launch_bounds__(kThreads)
    RowOffsetsKernel(const RowPiece* pieces, int64_t num_pieces, int64_t num_rows,
                     int64_t* offsets) {
  const int64_t i = GlobalThread();
  if (i >= num_rows) return;
  const RowPiece& piece = pieces[PieceOf(pieces, num_pieces, i)];
  offsets[i] = piece.start + (i - piece.begin) * piece.dim;
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

void StoreInBlocks(Stream stream, const void* words, size_t num_words,
                   const std::vector<int64_t>& targets, uint64_t* message) {
  const size_t most = ArgumentWords::kMost - num_words;
  for (size_t first = 0; first < targets.size(); first += most) {
    const size_t count = std::min(most, targets.size() - first);
    ArgumentWords values = {};
    std::memcpy(values.words, words, num_words * sizeof(uint64_t));
    std::memcpy(values.words + num_words, targets.data() + first, count * sizeof(uint64_t));
    Launch(StoreInBlocksKernel, static_cast<int64_t>(num_words * count), stream, values,
           static_cast<int64_t>(num_words), static_cast<int64_t>(count), message);
  }
}

template <typename T>
void MoveSegments(Stream stream, Workspace& workspace, const std::vector<Move<T>>& moves) {
  std::vector<Piece<T>> pieces;
  int64_t total = 0;
  for (const Move<T>& move : moves) {
    if (move.count == 0) continue;
    pieces.push_back({total, move.from, move.to});
    total += move.count;
  }
  if (total == 0) return;
  const Workspace::Scope scope(workspace, stream);
  const Piece<T>* const there = Upload(stream, workspace, pieces);
  Launch(MoveKernel<T>, (total + kPerThread - 1) / kPerThread, stream, there,
         static_cast<int64_t>(pieces.size()), total);
}

void RowOffsets(Stream stream, Workspace& workspace, const std::vector<RowSegment>& segments,
                int64_t* offsets) {
  std::vector<RowPiece> pieces;
  int64_t total = 0;
  for (const RowSegment& segment : segments) {
    if (segment.num_rows == 0) continue;
    pieces.push_back({total, segment.start, segment.dim});
    total += segment.num_rows;
  }
  if (total == 0) return;
  const Workspace::Scope scope(workspace, stream);
  const RowPiece* const there = Upload(stream, workspace, pieces);
  Launch(RowOffsetsKernel, total, stream, there, static_cast<int64_t>(pieces.size()), total,
         offsets);
}

template <typename T>
std::vector<T> Heads(Stream stream, Workspace& workspace, const T* message, const int32_t* lengths,
                     int64_t num_blocks, int64_t num_words) {
  const Workspace::Scope scope(workspace, stream);
  std::vector<T> heads(num_blocks * num_words);
  T* const there = workspace.Take<T>(num_blocks * num_words);
  FillWithZeros(stream, there, heads.size() * sizeof(T));
  std::vector<Move<T>> moves;
  for (int64_t b = 0; b < num_blocks; ++b) {
    moves.push_back({message, there + b * num_words, std::min<int64_t>(num_words, lengths[b])});
    message += lengths[b];
  }
  MoveSegments(stream, workspace, moves);
  CopyToHost(stream, heads.data(), there, heads.size() * sizeof(T));
  return heads;
}

template void MoveSegments<uint64_t>(Stream, Workspace&, const std::vector<Move<uint64_t>>&);
template void MoveSegments<int64_t>(Stream, Workspace&, const std::vector<Move<int64_t>>&);
template void MoveSegments<float>(Stream, Workspace&, const std::vector<Move<float>>&);
template std::vector<int64_t> Heads<int64_t>(Stream, Workspace&, const int64_t*, const int32_t*,
                                             int64_t, int64_t);
template std::vector<float> Heads<float>(Stream, Workspace&, const float*, const int32_t*, int64_t,
                                         int64_t);

}  // namespace cuda
}  // namespace sok
