// The functions of MPI that the engine calls, in the library that the job's launcher belongs to.
//
// They are looked up when the job starts, and no header of MPI is read. So one build of this package
// serves every MPI, and can be made where there is none. Two binary interfaces exist: that of Open
// MPI, whose handles are addresses, and that of MPICH, Intel MPI, MVAPICH and Cray MPI, whose
// handles are integers. Both have been stable for ten years.
#ifndef SOK_MPI_LIBRARY_H_
#define SOK_MPI_LIBRARY_H_

#include <cstdint>
#include <memory>
#include <string>

namespace sok {

class Mpi {
 public:
  // A communicator or a request of either interface.
  using Handle = uint64_t;
  enum class Type { kByte, kFloat, kDouble, kInt32, kInt64 };

  // Throws std::runtime_error if the file is no MPI library, as do all calls that fail.
  static std::unique_ptr<Mpi> Load(const std::string& file);
  virtual ~Mpi() = default;

  virtual bool Initialized() = 0;  // by anyone
  virtual bool Finalized() = 0;
  // Both return whether all threads may call MPI.
  virtual bool InitThread() = 0;
  virtual bool QueryThread() = 0;
  virtual void Finalize() = 0;

  virtual Handle World() = 0;
  virtual int Rank(Handle comm) = 0;
  virtual int Size(Handle comm) = 0;
  // These three wait for the other ranks. Errors in the new communicator are returned, not fatal.
  virtual Handle Duplicate(Handle comm) = 0;
  virtual Handle Split(Handle comm, int color, int key) = 0;
  virtual Handle SplitByHost(Handle comm, int key) = 0;

  virtual Handle Isend(const void* data, int bytes, int to, int tag, Handle comm) = 0;
  virtual Handle Irecv(void* data, int bytes, int from, int tag, Handle comm) = 0;
  virtual Handle IrecvFromAny(void* data, int bytes, int tag, Handle comm) = 0;
  virtual Handle Iallreduce(const void* in, void* out, int n, Type type, Handle comm) = 0;
  virtual Handle Ireduce(const void* in, void* out, int n, Type type, int root, Handle comm) = 0;
  virtual Handle Ibcast(void* data, int bytes, int root, Handle comm) = 0;
  // Whether the request has ended; then it is freed.
  virtual bool Test(Handle* request) = 0;
  virtual void Cancel(Handle* request) = 0;
};

}  // namespace sok

#endif  // SOK_MPI_LIBRARY_H_
