// Memory of the emulated devices: one range of addresses that the host cannot touch.
//
//     | block, 0xA5 until written | guard | block, freed: 0x5A | guard | ...     1/16 TiB reserved
//
// Pages are open while kernels, fills and copies run, and closed otherwise: a device pointer that
// the host follows ends the program, with a message. What kernels are given is looked through
// before they run: an address in there must be of a block that lives at this point of the stream,
// and other addresses must not be those of host memory, unless it is pinned. So a host pointer, and
// memory that another stream has not been given yet or has freed, ends the program, too.
//
// A block lives from where its stream comes to the allocation until a stream comes to its end. Only
// then it may become another block.
//
// Not seen: addresses that a kernel reads from device memory.
#ifndef SOK_TESTS_EMULATOR_DEVICE_MEMORY_H_
#define SOK_TESTS_EMULATOR_DEVICE_MEMORY_H_

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace emulator {

inline unsigned first_seed = 1;  // SOK_EMULATOR_SEED (streams.h)
inline thread_local int current_device = 0;
inline thread_local bool has_context = false;  // of the current device; this thread
inline int forbidden_device = -1;              // for tests: no call may make a context there
// Arrays of tests and of TensorFlow that are in host memory count as device memory.
inline bool host_arrays_allowed = false;
// For tests with such arrays that look at results without waiting: streams do not run late, and
// device memory is open all the time, since opening and closing it for each kernel takes longer
// than the kernels.
inline bool runs_at_once = false;
// Device memory beside this one, of TensorFlow on a fake GPU (cpp/tests/fake_gpu). Null: there is none.
struct OtherMemory {
  void (*open)();
  void (*close)();
  bool (*holds)(const void*);
};
inline OtherMemory other_memory = {};

[[noreturn]] inline void Fail(const std::string& what) {
  std::fprintf(stderr, "emulator: %s (SOK_EMULATOR_SEED=%u)\n", what.c_str(), first_seed);
  std::abort();
}

// What each call of the runtime does that needs a device.
inline void MakeContext() {
  if (current_device == forbidden_device) {
    Fail("a context is made on device " + std::to_string(current_device) + ", which is not used");
  }
  has_context = true;
}

class DeviceMemory {
 public:
  // Kept for the life of the process: buffers may be freed while static objects are torn down.
  static DeviceMemory& Get() {
    static auto* const memory = new DeviceMemory;
    return *memory;
  }

  // ---- in the order of the host ----

  // A block that lives once Begin has run. Null if memory is out.
  char* Allocate(size_t bytes) {
    const size_t needed = Rounded(bytes);
    auto fitting = free_.lower_bound(needed);
    char* begin;
    if (fitting != free_.end() && fitting->first <= 2 * needed) {
      begin = fitting->second;
      free_.erase(fitting);
    } else {
      if (static_cast<size_t>(base_ + kReserved - end_) < needed) return nullptr;
      begin = end_;
      end_ += needed;
      blocks_[begin].room = needed;
    }
    Block& block = blocks_[begin];
    block.bytes = bytes;
    block.device = current_device;
    block.state = kAsked;
    block.is_freed_by_host = false;
    return begin;
  }
  void FreeByHost(const void* pointer) {
    Block& block = BlockAt(pointer, "cudaFreeAsync");
    if (block.device != current_device) {
      Fail("memory of device " + std::to_string(block.device) + " is freed with " +
           std::to_string(current_device) + " current");
    }
    if (block.is_freed_by_host) Fail("memory is freed twice");
    block.is_freed_by_host = true;
  }

  // ---- in the order of a stream, while memory is open ----

  void Begin(char* begin) {
    Block& block = blocks_[begin];
    block.state = kLive;
    ASAN_UNPOISON_MEMORY_REGION(begin, block.room);
    std::memset(begin, 0xA5, block.bytes);
    std::memset(begin + block.bytes, kGuard, block.room - block.bytes);
    ASAN_POISON_MEMORY_REGION(begin + (block.bytes + 7) / 8 * 8, kGuardBytes / 2);
  }
  void End(char* begin) {
    Block& block = BlockAt(begin, "cudaFreeAsync");
    if (block.state != kLive) Fail("memory is freed before its stream has come to its allocation");
    ASAN_UNPOISON_MEMORY_REGION(begin, block.room);
    for (size_t i = block.bytes; i < block.room; ++i) {
      if (begin[i] != kGuard) Fail("something was written behind the end of a block");
    }
    std::memset(begin, 0x5A, block.bytes);
    ASAN_POISON_MEMORY_REGION(begin, block.room);
    block.state = kGone;
    free_.emplace(block.room, begin);
  }

  // ---- protection ----

  void Open() {
    if (depth_++ > 0) return;
    Protect(PROT_READ | PROT_WRITE);
    if (other_memory.open != nullptr) other_memory.open();
  }
  void Close() {
    if (--depth_ > 0) return;
    if (!runs_at_once) Protect(PROT_NONE);
    if (other_memory.close != nullptr) other_memory.close();
  }

  // ---- checks. `now`: at this point of a stream; otherwise as the host calls ----

  bool Holds(const void* pointer) const { return pointer >= base_ && pointer < base_ + kReserved; }
  // Whether a kernel may use it as device memory.
  bool IsDevice(const void* pointer) const {
    return Holds(pointer) || host_arrays_allowed || IsOther(pointer);
  }
  void RequireDevice(const void* pointer, size_t bytes, bool now, const char* what) const {
    if (bytes == 0) return;
    if (!IsDevice(pointer)) Fail(std::string(what) + ": a host pointer for device memory");
    if (!Holds(pointer)) return;
    const auto& [begin, block] = Around(pointer, what);
    RequireAlive(block, now, what);
    if (static_cast<const char*>(pointer) + bytes > begin + block.bytes) {
      Fail(std::string(what) + ": beyond the end of a block");
    }
  }
  void RequireHost(const void* pointer, size_t bytes, const char* what) const {
    if (bytes > 0 && (Holds(pointer) || IsOther(pointer))) {
      Fail(std::string(what) + ": a device pointer for host memory");
    }
  }
  // Looks for addresses among the words of what a kernel is given.
  void CheckWords(const void* data, size_t bytes, bool now) const {
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
      uint64_t word;
      std::memcpy(&word, static_cast<const char*>(data) + i, 8);
      const auto* const pointer = reinterpret_cast<const char*>(word);
      if (Holds(pointer)) {
        RequireAlive(Around(pointer, "a kernel's argument").second, now, "a kernel's argument");
      } else if (!now && !IsDevice(pointer) && IsMapped(word) && !IsPinned(pointer)) {
        Fail("a kernel's argument is a pointer to host memory");
      }
    }
  }

  void AddPinned(const void* pointer, size_t bytes) {
    pinned_[static_cast<const char*>(pointer)] = bytes;
  }
  void RemovePinned(const void* pointer) { pinned_.erase(static_cast<const char*>(pointer)); }

  int64_t BytesOf(const void* pointer) { return BlockAt(pointer, "cudaFreeAsync").bytes; }

 private:
  enum State { kAsked, kLive, kGone };
  struct Block {
    size_t bytes = 0, room = 0;
    int device = 0;
    State state = kGone;
    bool is_freed_by_host = false;
  };
  static constexpr size_t kReserved = size_t{64} << 30;
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kGuardBytes = 256;
  static constexpr char kGuard = 0x3C;

  DeviceMemory() {
    void* const range = mmap(nullptr, kReserved + kHugePage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) Fail("no addresses for device memory");
    base_ = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(range) + kHugePage - 1) /
                                    kHugePage * kHugePage);
    end_ = base_;
    madvise(base_, kReserved, MADV_HUGEPAGE);  // protecting large pages takes a hundredth
    struct sigaction action = {};
    action.sa_sigaction = &DeviceMemory::OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &OldAction());
  }

  static size_t Rounded(size_t bytes) { return (bytes + kGuardBytes + 255) / 256 * 256; }

  void Protect(int how) {
    const size_t used = (end_ - base_ + kHugePage - 1) / kHugePage * kHugePage;
    if (how == how_ && used == protected_) return;
    if (used > 0 && mprotect(base_, used, how) != 0) Fail("mprotect");
    how_ = how;
    protected_ = used;
  }

  static struct sigaction& OldAction() {
    static struct sigaction old;
    return old;
  }
  static void OnFault(int, siginfo_t* info, void*) {
    if (Get().Holds(info->si_addr)) {
      constexpr char kText[] = "emulator: the host touches device memory\n";
      [[maybe_unused]] const auto written = write(2, kText, sizeof(kText) - 1);
    }
    sigaction(SIGSEGV, &OldAction(), nullptr);  // which the same fault comes to next
  }

  const std::pair<char* const, Block>& Around(const void* pointer, const char* what) const {
    auto after = blocks_.upper_bound(const_cast<char*>(static_cast<const char*>(pointer)));
    if (after == blocks_.begin()) Fail(std::string(what) + ": an address of no block");
    --after;
    if (pointer >= after->first + after->second.room) {
      Fail(std::string(what) + ": an address of no block");
    }
    return *after;
  }
  static void RequireAlive(const Block& block, bool now, const char* what) {
    if (now && block.state == kAsked) {
      Fail(std::string(what) + " is memory that this stream may get before it is allocated");
    }
    if (now ? block.state == kGone : block.is_freed_by_host) {
      Fail(std::string(what) + " is memory that has been freed" +
           (now ? " when its stream may come here" : ""));
    }
  }
  Block& BlockAt(const void* pointer, const char* what) {
    const auto found = blocks_.find(const_cast<char*>(static_cast<const char*>(pointer)));
    if (found == blocks_.end()) Fail(std::string(what) + ": not the begin of a block");
    return found->second;
  }

  bool IsPinned(const char* pointer) const {
    auto after = pinned_.upper_bound(pointer);
    return after != pinned_.begin() && pointer < (--after)->first + after->second;
  }
  static bool IsOther(const void* pointer) {
    return other_memory.holds != nullptr && other_memory.holds(pointer);
  }
  static bool IsMapped(uint64_t word) {
    // Programs, stacks and heaps lie above; below, where numbers look like addresses, is what
    // sanitizers map for themselves.
    if (word < uint64_t{1} << 46 || word >= uint64_t{1} << 47) return false;
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    unsigned char unused;
    return mincore(reinterpret_cast<void*>(word / page * page), 1, &unused) == 0;
  }

  char* base_;
  char* end_;  // of what was ever given out
  int depth_ = 0;
  int how_ = PROT_NONE;
  size_t protected_ = 0;  // bytes that are so
  std::map<char*, Block> blocks_;
  std::multimap<size_t, char*> free_;
  std::map<const char*, size_t> pinned_;
};

// The arguments of a kernel as they are looked through: padding, and jobs that are not there, may
// hold anything.
template <typename T, typename = void>
struct IsJobs : std::false_type {};
template <typename T>
struct IsJobs<T, std::void_t<decltype(T::kMost), decltype(std::declval<T>().job)>>
    : std::true_type {};

template <typename T>
void CheckArgument(const T& argument, bool now) {
  if constexpr (IsJobs<T>::value) {
    for (int i = 0; i < argument.count; ++i) CheckArgument(argument.job[i], now);
  } else {
    alignas(T) unsigned char bytes[sizeof(T)];
    std::memcpy(bytes, &argument, sizeof(T));
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(reinterpret_cast<T*>(bytes));
    DeviceMemory::Get().CheckWords(bytes, sizeof(T), now);
#endif
#endif
  }
}

}  // namespace emulator

#endif  // SOK_TESTS_EMULATOR_DEVICE_MEMORY_H_
