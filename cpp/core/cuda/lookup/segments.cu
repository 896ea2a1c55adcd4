#include <algorithm>
#include <cstring>

#include "cpp/core/cuda/device/launch.cuh"
#include "cpp/core/cuda/lookup/segments.h"

namespace sok {
namespace cuda {
namespace {

constexpr int kPerThread = 8;
constexpr size_t kMostUploaded = size_t{1} << 16;  // bytes; for more, a wait beats the launches

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
  if (num_words * sizeof(uint64_t) > kMostUploaded) {
    return CopyToDevice(stream, to, words, num_words * sizeof(uint64_t));
  }
  const char* from = static_cast<const char*>(words);
  while (num_words > 0) {
    const size_t count = std::min(num_words, ArgumentWords::kMost);
    ArgumentWords values;
    std::memcpy(values.words, from, count * sizeof(uint64_t));
    std::memset(values.words + count, 0, sizeof(values) - count * sizeof(uint64_t));
    Launch(StoreKernel, static_cast<int64_t>(count), stream, values, static_cast<int64_t>(count),
           to);
    from += count * sizeof(uint64_t);
    to += count;
    num_words -= count;
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
