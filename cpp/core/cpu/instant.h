// Instant: the rows of a table as they were when a dump was begun, while other calls change them.
//
//     row number r -> places_[r]   here, unchanged | read | initial | copy c       4 bytes
//     copy c       -> key, row number, record, and the row with its slot rows
//
// Whoever is about to change a row, or to take its number from its key, calls Save first. Save copies
// the row unless it was copied or read before, or is of a later key. So a row is copied once at most.
// The reader of the dump finds each row where it is, and frees its copy. Tables without a hashtable
// have rows that were never written; those are noted, not copied.
//
// Memory: 4 bytes per row, and the copies that wait for the reader. If they are more than `limit`
// rows, calls that change the table wait until the reader has freed a 64th of that. One call may
// exceed it: by its own rows, or by all the rest if it changes every row (SaveRest). Copies of rows
// on disk are on disk, too, and share the limit of the table's memory.
//
// New memory costs more than the copies themselves: the system clears each page at its first touch. So
// the table keeps the memory, up to the limit, for its next instant. The system may take the pages
// of copies whenever it is short of memory (Memory::Offer).
//
// Save and SaveRest need the table's exclusive lock, what the reader calls needs a shared one.
#ifndef SOK_CORE_CPU_INSTANT_H_
#define SOK_CORE_CPU_INSTANT_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpp/core/cpu/arena.h"
#include "cpp/core/cpu/memory.h"
#include "cpp/core/cpu/pace.h"
#include "cpp/core/cpu/table.h"

namespace sok {

// What a row means, apart from its embedding.
struct RowLayout {
  std::vector<SlotVariableSpec> slots;
  std::vector<float> slot_initial;  // slot rows of a key without a row
  double initial_row_scale;
};

class CpuTable::Instant {
 public:
  // What an instant takes memory for, and the next one uses again.
  struct Room {
    Memory places;       // by row number
    uint32_t first = 1;  // of the values of places; those below are of earlier instants
    Arena copies;
    std::vector<uint64_t> keys;    // of each copy, as the next two
    std::vector<uint32_t> rows;    // row numbers
    std::vector<int64_t> records;  // three each; empty without policies
    std::vector<uint32_t> free;    // copies

    int64_t bytes() const;
  };

  // The present instant, in the room that the table keeps. Throws std::bad_alloc.
  explicit Instant(Impl& impl);
  ~Instant();
  Instant(const Instant&) = delete;

  // If memory is short, reading fails later, not this call.
  void Save(Executor& ex, const uint64_t* keys, const uint32_t* rows, int64_t num_keys) noexcept;
  // Saves all rows that are still here.
  void SaveRest(Executor& ex) noexcept;
  // A key gets a row number that was free at the instant.
  void Skip(uint32_t row) noexcept {
    if (IsHere(row)) place(row) = room_->first + kRead;
  }

  // ---- of the reader ----
  bool IsHere(uint32_t row) const { return row < num_rows_ && place(row) < room_->first; }
  // Calls fn(key, row number) for each copy.
  template <typename Fn>
  void ForEachCopy(const Fn& fn) const {
    const Room& room = *room_;
    for (size_t c = 0; c < room.keys.size(); ++c) {
      if (place(room.rows[c]) == room.first + kCopies + c) fn(room.keys[c], room.rows[c]);
    }
  }
  void CheckSaved() const;  // throws std::runtime_error if a row could not be saved
  // Reads rows, slot rows and records, each or null; once for each row.
  void Read(const uint64_t* keys, const uint32_t* rows, int64_t num_keys, float* embeddings,
            float* slot_rows, int64_t* records);
  // Nothing is saved any more.
  void Stop() noexcept;

  // The room for the table to keep, or null; nobody may use this any more.
  std::unique_ptr<Room> Leave() noexcept;

  int64_t bytes() const { return room_->bytes(); }

  // Of all instants of the process: their tables train together, and are read one after the other.
  static Demand OfAll();

 private:
  // Values of places, from room_->first on; kCopies + c: copy c.
  static constexpr uint32_t kRead = 0, kInitial = 1, kCopies = 2;

  uint32_t& place(uint32_t row) const { return static_cast<uint32_t*>(room_->places.data())[row]; }
  void Copy(Executor& ex, const uint64_t* keys, const uint32_t* rows, int64_t num_keys);
  // Copies whose memory is kept: the limit, and what one call may add.
  int64_t MostKept() const { return std::min(limit_ + limit_ / 8, num_rows_); }
  uint32_t NewCopy(uint64_t key, uint32_t row);
  // Lets calls that change the table wait, or go on.
  void Throttle() noexcept;

  Impl& impl_;
  const RowLayout layout_;
  int64_t num_rows_;  // row numbers of the instant are below; 0 when no row is here any more
  const int64_t row_floats_;
  std::unique_ptr<Room> room_;
  int64_t limit_;  // copies that may wait for the reader
  struct Fresh {
    uint32_t row, copy;
  };
  std::vector<Fresh> fresh_;  // of the present call
  std::string problem_;       // why a row could not be saved
  bool stopped_ = false, throttles_ = false;
  std::atomic<int64_t> waiting_{0};  // copies

  inline static std::atomic<int64_t> changes_{0};
  inline static std::mutex all_mutex_;  // guards all_
  inline static std::vector<const Instant*> all_;
};

}  // namespace sok

#endif  // SOK_CORE_CPU_INSTANT_H_
