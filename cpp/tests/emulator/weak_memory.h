// Memory as a kernel's threads may see it on a device, which is not the order of their writes.
//
//     atomic writes of a kernel --> shadow: word -> (value, value before, number of the write)
//     atomic reads              <-- either value, until the thread must know better
//     plain reads               <-- memory as it was when the kernel began
//     end of the kernel             the shadow is written to memory
//
// A relaxed read may get the value before the last one, unless this thread has seen the newer one,
// or has read, with acquire order, something that was written later with release order. So a
// missing acquire or release shows as a key without its row, or the other way round. A plain read
// never sees what the kernel's atomics write, like one from a stale L1: code that relies on it goes
// wrong here.
//
// Invariant: reads of one word by one thread never go back. A value of 8 bytes that was written at
// once is read at once; what was written in two words may be read as old and new.
//
// Not covered: fences, of which the backend has none; plain writes that other threads read in the
// same kernel, which are seen at once; more than one value before the last.
#ifndef SOK_TESTS_EMULATOR_WEAK_MEMORY_H_
#define SOK_TESTS_EMULATOR_WEAK_MEMORY_H_

#include <cstdint>
#include <cstring>
#include <random>
#include <unordered_map>

namespace emulator {

inline std::minstd_rand random_bits(1);

// What a thread has seen, beginning with nothing of its kernel.
struct View {
  uint64_t all = 0;                                // every write up to this one
  std::unordered_map<const char*, uint64_t> seen;  // and of a word up to this one

  void Clear() {
    all = 0;
    seen.clear();
  }
};

class WeakMemory {
 public:
  static WeakMemory& Get() {
    static WeakMemory memory;
    return memory;
  }

  template <typename T>
  T Load(const T* pointer, bool acquire, View& view) {
    T value;
    uint64_t chosen_for = 0;  // a write, all words of which are read alike
    bool chosen = false;
    uint64_t released = 0;
    for (size_t i = 0; i < sizeof(T); i += kWord) {
      const char* const address = reinterpret_cast<const char*>(pointer) + i;
      uint32_t word;
      const auto found = shadow_.find(address);
      if (found == shadow_.end()) {
        std::memcpy(&word, address, kWord);
      } else {
        const Entry& entry = found->second;
        uint64_t& seen = view.seen[address];
        bool fresh = entry.number <= view.all || entry.number <= seen;
        if (!fresh) {
          if (chosen_for != entry.number) chosen = random_bits() % 3 != 0;
          chosen_for = entry.number;
          fresh = chosen;
        }
        word = fresh ? entry.value : entry.before;
        if (fresh) seen = entry.number;
        if (fresh && entry.release) released = entry.number;
      }
      std::memcpy(reinterpret_cast<char*>(&value) + i, &word, kWord);
    }
    if (acquire && released > view.all) view.all = released;
    return value;
  }

  template <typename T>
  void Store(T* pointer, T value, bool release, View& view) {
    Write(pointer, value, release, view);
  }

  // value = f(value), at once and on the newest value. Returns the one before.
  template <typename T, typename F>
  T Update(T* pointer, const F& f, View& view) {
    const T before = Newest(pointer);
    const T after = f(before);
    if (std::memcmp(&before, &after, sizeof(T)) != 0) {
      Write(pointer, after, false, view);
    } else if (const auto found = shadow_.find(reinterpret_cast<const char*>(pointer));
               found != shadow_.end()) {
      view.seen[found->first] = found->second.number;
    }
    return before;
  }

  uint64_t last_number() const { return last_number_; }

  void EndOfKernel() {
    for (const auto& [address, entry] : shadow_) {
      std::memcpy(const_cast<char*>(address), &entry.value, kWord);
    }
    shadow_.clear();
  }

 private:
  static constexpr size_t kWord = 4;
  struct Entry {
    uint32_t value, before;
    uint64_t number;
    bool release;
  };

  template <typename T>
  T Newest(const T* pointer) const {
    T value;
    for (size_t i = 0; i < sizeof(T); i += kWord) {
      const char* const address = reinterpret_cast<const char*>(pointer) + i;
      const auto found = shadow_.find(address);
      std::memcpy(
          reinterpret_cast<char*>(&value) + i,
          found == shadow_.end() ? address : reinterpret_cast<const char*>(&found->second.value),
          kWord);
    }
    return value;
  }

  template <typename T>
  void Write(T* pointer, const T& value, bool release, View& view) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what a device writes at once");
    const T before = Newest(pointer);
    ++last_number_;
    for (size_t i = 0; i < sizeof(T); i += kWord) {
      const char* const address = reinterpret_cast<const char*>(pointer) + i;
      Entry& entry = shadow_[address];
      std::memcpy(&entry.value, reinterpret_cast<const char*>(&value) + i, kWord);
      std::memcpy(&entry.before, reinterpret_cast<const char*>(&before) + i, kWord);
      entry.number = last_number_;
      entry.release = release;
      view.seen[address] = last_number_;
    }
  }

  std::unordered_map<const char*, Entry> shadow_;
  uint64_t last_number_ = 0;
};

}  // namespace emulator

#endif  // SOK_TESTS_EMULATOR_WEAK_MEMORY_H_
