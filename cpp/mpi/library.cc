#include "cpp/mpi/library.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace sok {
namespace {

constexpr int kThreadMultiple = 3;
constexpr int kLongestError = 8192;

void* SymbolOf(void* library, const char* name) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(std::string("the library has no ") + name);
  return symbol;
}

// Handles are the addresses of objects of the library.
struct OpenMpi {
  using Object = void*;
  static constexpr int kAnySource = -1;
  static constexpr int kTypeShared = 0;

  explicit OpenMpi(void* library)
      : world(SymbolOf(library, "ompi_mpi_comm_world")),
        errors_return(SymbolOf(library, "ompi_mpi_errors_return")),
        no_info(SymbolOf(library, "ompi_mpi_info_null")),
        sum(SymbolOf(library, "ompi_mpi_op_sum")),
        types{SymbolOf(library, "ompi_mpi_byte"), SymbolOf(library, "ompi_mpi_float"),
              SymbolOf(library, "ompi_mpi_double"), SymbolOf(library, "ompi_mpi_int"),
              SymbolOf(library, "ompi_mpi_long_long_int")} {}

  Object world, errors_return, no_info, sum;
  Object types[5];  // by Mpi::Type
};

struct Mpich {
  using Object = int;
  static constexpr int kAnySource = -2;
  static constexpr int kTypeShared = 1;

  explicit Mpich(void*) {}

  Object world = 0x44000000, errors_return = 0x54000001, no_info = 0x1c000000, sum = 0x58000003;
  Object types[5] = {0x4c00010d, 0x4c00040a, 0x4c00080b, 0x4c000405, 0x4c000809};
};

// Either's MPI_Status has at most 24 bytes. The engine reads none.
struct Status {
  alignas(16) char unread[64];
};

template <typename Abi>
class MpiOf final : public Mpi {
 public:
  using Object = typename Abi::Object;

  explicit MpiOf(void* library) : abi_(library) {
    const auto find = [library](const char* name, auto* function) {
      using Function = std::remove_pointer_t<decltype(function)>;
      *function = reinterpret_cast<Function>(SymbolOf(library, name));
    };
    find("MPI_Initialized", &initialized_);
    find("MPI_Finalized", &finalized_);
    find("MPI_Init_thread", &init_thread_);
    find("MPI_Query_thread", &query_thread_);
    find("MPI_Finalize", &finalize_);
    find("MPI_Error_string", &error_string_);
    find("MPI_Comm_rank", &comm_rank_);
    find("MPI_Comm_size", &comm_size_);
    find("MPI_Comm_dup", &comm_dup_);
    find("MPI_Comm_split", &comm_split_);
    find("MPI_Comm_split_type", &comm_split_type_);
    find("MPI_Comm_set_errhandler", &set_errhandler_);
    find("MPI_Isend", &isend_);
    find("MPI_Irecv", &irecv_);
    find("MPI_Iallreduce", &iallreduce_);
    find("MPI_Ireduce", &ireduce_);
    find("MPI_Ibcast", &ibcast_);
    find("MPI_Test", &test_);
    find("MPI_Cancel", &cancel_);
    find("MPI_Request_free", &request_free_);
  }

  bool Initialized() override { return Flag(initialized_); }
  bool Finalized() override { return Flag(finalized_); }
  bool InitThread() override {
    int provided = 0;
    Check(init_thread_(nullptr, nullptr, kThreadMultiple, &provided));
    return provided >= kThreadMultiple;
  }
  bool QueryThread() override {
    int provided = 0;
    Check(query_thread_(&provided));
    return provided >= kThreadMultiple;
  }
  void Finalize() override { Check(finalize_()); }

  Handle World() override { return Wide(abi_.world); }
  int Rank(Handle comm) override {
    int rank = 0;
    Check(comm_rank_(Narrow(comm), &rank));
    return rank;
  }
  int Size(Handle comm) override {
    int size = 0;
    Check(comm_size_(Narrow(comm), &size));
    return size;
  }
  Handle Duplicate(Handle comm) override {
    Object made;
    Check(comm_dup_(Narrow(comm), &made));
    return ReturningErrors(made);
  }
  Handle Split(Handle comm, int color, int key) override {
    Object made;
    Check(comm_split_(Narrow(comm), color, key, &made));
    return ReturningErrors(made);
  }
  Handle SplitByHost(Handle comm, int key) override {
    Object made;
    Check(comm_split_type_(Narrow(comm), Abi::kTypeShared, key, abi_.no_info, &made));
    return ReturningErrors(made);
  }

  Handle Isend(const void* data, int bytes, int to, int tag, Handle comm) override {
    return Begun(isend_, data, bytes, TypeOf(Type::kByte), to, tag, Narrow(comm));
  }
  Handle Irecv(void* data, int bytes, int from, int tag, Handle comm) override {
    return Begun(irecv_, data, bytes, TypeOf(Type::kByte), from, tag, Narrow(comm));
  }
  Handle IrecvFromAny(void* data, int bytes, int tag, Handle comm) override {
    return Irecv(data, bytes, Abi::kAnySource, tag, comm);
  }
  Handle Iallreduce(const void* in, void* out, int n, Type type, Handle comm) override {
    return Begun(iallreduce_, in, out, n, TypeOf(type), abi_.sum, Narrow(comm));
  }
  Handle Ireduce(const void* in, void* out, int n, Type type, int root, Handle comm) override {
    return Begun(ireduce_, in, out, n, TypeOf(type), abi_.sum, root, Narrow(comm));
  }
  Handle Ibcast(void* data, int bytes, int root, Handle comm) override {
    return Begun(ibcast_, data, bytes, TypeOf(Type::kByte), root, Narrow(comm));
  }
  bool Test(Handle* request) override {
    Object object = Narrow(*request);
    int ended = 0;
    Status status;
    Check(test_(&object, &ended, &status));
    *request = Wide(object);
    return ended != 0;
  }
  void Cancel(Handle* request) override {
    Object object = Narrow(*request);
    Check(cancel_(&object));
    Check(request_free_(&object));
  }

 private:
  static Handle Wide(Object object) {
    Handle handle = 0;
    std::memcpy(&handle, &object, sizeof(object));
    return handle;
  }
  static Object Narrow(Handle handle) {
    Object object;
    std::memcpy(&object, &handle, sizeof(object));
    return object;
  }
  Object TypeOf(Type type) const { return abi_.types[static_cast<int>(type)]; }

  Handle ReturningErrors(Object comm) {
    Check(set_errhandler_(comm, abi_.errors_return));
    return Wide(comm);
  }
  template <typename Function, typename... Arguments>
  Handle Begun(Function begin, Arguments... arguments) {
    Object request;
    Check(begin(arguments..., &request));
    return Wide(request);
  }
  bool Flag(int (*ask)(int*)) {
    int flag = 0;
    Check(ask(&flag));
    return flag != 0;
  }
  void Check(int code) {
    if (code == 0) return;
    std::string text(kLongestError, '\0');
    int length = 0;
    if (error_string_(code, text.data(), &length) != 0) length = 0;
    throw std::runtime_error("MPI reports error " + std::to_string(code) + ": " +
                             text.substr(0, length));
  }

  Abi abi_;
  int (*initialized_)(int*);
  int (*finalized_)(int*);
  int (*init_thread_)(int*, char***, int, int*);
  int (*query_thread_)(int*);
  int (*finalize_)();
  int (*error_string_)(int, char*, int*);
  int (*comm_rank_)(Object, int*);
  int (*comm_size_)(Object, int*);
  int (*comm_dup_)(Object, Object*);
  int (*comm_split_)(Object, int, int, Object*);
  int (*comm_split_type_)(Object, int, int, Object, Object*);
  int (*set_errhandler_)(Object, Object);
  int (*isend_)(const void*, int, Object, int, int, Object, Object*);
  int (*irecv_)(void*, int, Object, int, int, Object, Object*);
  int (*iallreduce_)(const void*, void*, int, Object, Object, Object, Object*);
  int (*ireduce_)(const void*, void*, int, Object, Object, int, Object, Object*);
  int (*ibcast_)(void*, int, Object, int, Object, Object*);
  int (*test_)(Object*, int*, Status*);
  int (*cancel_)(Object*);
  int (*request_free_)(Object*);
};

}  // namespace

std::unique_ptr<Mpi> Mpi::Load(const std::string& file) {
  // Open MPI loads plug-ins that look for its symbols among the global ones.
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  if (dlsym(library, "ompi_mpi_comm_world") != nullptr) {
    return std::make_unique<MpiOf<OpenMpi>>(library);
  }
  return std::make_unique<MpiOf<Mpich>>(library);
}

}  // namespace sok
