// The engine for Python (sok_like/runtime/ranks/mpi.py), which calls these by ctypes.
#include <cstdio>
#include <stdexcept>

#include "cpp/mpi/engine.h"

#define SOK_EXPORT extern "C" __attribute__((visibility("default")))

using sok::Engine;

// Meets the other ranks through the MPI library of this file; writes what went wrong, or nothing.
SOK_EXPORT void sok_mpi_start(const char* library, char* problem, int64_t size) {
  problem[0] = '\0';
  try {
    Engine::Get().Start(library);
  } catch (const std::exception& error) {
    std::snprintf(problem, size, "%s", error.what());
  }
}

// This rank and the number of ranks, of the job and of this host.
SOK_EXPORT void sok_mpi_place(int* place) {
  const Engine& engine = Engine::Get();
  place[0] = engine.world().me;
  place[1] = static_cast<int>(engine.world().ranks.size());
  place[2] = engine.local_rank();
  place[3] = engine.local_size();
}

// The number of this rank's group, of groups that lie one after the other.
SOK_EXPORT int sok_mpi_divide(const int* ranks, const int* sizes, int num_groups, char* problem,
                              int64_t size) {
  problem[0] = '\0';
  std::vector<std::vector<int>> groups;
  for (int i = 0; i < num_groups; ranks += sizes[i++]) groups.emplace_back(ranks, ranks + sizes[i]);
  try {
    return Engine::Get().Divide(groups);
  } catch (const std::exception& error) {
    std::snprintf(problem, size, "%s", error.what());
    return -1;
  }
}

// Ends all requests of this process, and later ones: they raise the reason.
SOK_EXPORT void sok_mpi_stop(const char* reason) { Engine::Get().Stop(reason); }

// What Engine::OnInterrupt asks.
SOK_EXPORT void sok_mpi_on_interrupt(int (*ends)()) { Engine::Get().OnInterrupt(ends); }

// Ends the engine when all ranks have called this; 0 if they have not after `seconds`.
SOK_EXPORT int sok_mpi_close(double seconds) { return Engine::Get().Close(seconds) ? 1 : 0; }
