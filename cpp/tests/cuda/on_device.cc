// What runtime.h declares for tests on a device. operator new in pinned memory:
//
//     one block of pinned memory | size, 16 bytes | piece | size | piece | ... | free space
//
// A piece is a power of two and goes back to a list of its size. Invariant: memory from before the
// block was made, or that does not fit into it, is malloc's.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

#include "cpp/tests/cuda/runtime.h"

namespace {

constexpr size_t kBlockBytes = size_t{1} << 30, kHead = 16;

struct Piece {
  size_t size_bits;
  Piece* next;  // of those that are free
};

std::mutex mutex;
char* block = nullptr;
size_t used = 0;
Piece* free_pieces[64] = {};

void Require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::_Exit(1);
}

void* FromBlock(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (block == nullptr || bytes > kBlockBytes / 4) return nullptr;
  size_t bits = 5;
  while ((size_t{1} << bits) < bytes + kHead) ++bits;
  Piece* piece = free_pieces[bits];
  if (piece != nullptr) {
    free_pieces[bits] = piece->next;
  } else {
    if (used + (size_t{1} << bits) > kBlockBytes) return nullptr;
    piece = reinterpret_cast<Piece*>(block + used);
    used += size_t{1} << bits;
    piece->size_bits = bits;
  }
  return reinterpret_cast<char*>(piece) + kHead;
}

void Free(void* pointer) {
  char* const address = static_cast<char*>(pointer);
  if (block == nullptr || address < block || address >= block + kBlockBytes) {
    std::free(pointer);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  Piece* const piece = reinterpret_cast<Piece*>(address - kHead);
  piece->next = free_pieces[piece->size_bits];
  free_pieces[piece->size_bits] = piece;
}

}  // namespace

void* operator new(size_t bytes) {
  void* pointer = FromBlock(bytes);
  if (pointer == nullptr) pointer = std::malloc(bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}
void operator delete(void* pointer) noexcept { Free(pointer); }
void operator delete(void* pointer, size_t) noexcept { Free(pointer); }

namespace emulator {

void PinWhatNewReturns() {
  void* pinned = nullptr;
  Require(cudaMallocHost(&pinned, kBlockBytes), "cudaMallocHost");
  block = static_cast<char*>(pinned);
  // Static objects keep memory of the block longer than CUDA does.
  on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        std::_Exit(status);
      },
      nullptr);
}

// Read when the process first calls CUDA.
void WaitForEachLaunch() { setenv("CUDA_LAUNCH_BLOCKING", "1", /*overwrite=*/1); }

cudaStream_t StreamOfNumber(int number) {
  static cudaStream_t streams[8] = {};
  if (number > 0 && streams[number] == nullptr) {
    Require(cudaStreamCreateWithFlags(&streams[number], cudaStreamNonBlocking), "a stream");
  }
  return streams[number];
}

}  // namespace emulator
