// Reads all of a CudaTable in parts, for dumps and Export.
//
//     keys, row numbers   sorted once by key, and kept in device memory: 12 bytes per key
//     rows, records       gathered by row number for each part, and copied through pinned memory
//
// The table's mutex is held from the first part to the last. Without a hashtable there is nothing
// to sort: the row number is the position.
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/core/cuda/device/primitives.h"
#include "cpp/core/cuda/rows/direct_row_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

class CudaTable::Reader final : public TableReader {
 public:
  // Holds the mutex, which the caller has locked. The host must know the counters.
  Reader(Impl& impl, bool with_slots) : impl_(impl), num_keys_(impl.size.known()) {
    TableSnapshot& snapshot = about_.snapshot;
    snapshot.initial_row_scale = impl.InitialRowScale();
    if (with_slots) {
      NameSavedSlots(impl.slots, &snapshot);
      snapshot.optimizer_step = impl.step_number.last();
    }
    if (impl.records != nullptr) impl.ExportCounters(&snapshot.policy);
    if (!impl.is_direct() && num_keys_ > 0) SortKeys();
    impl.mutex.Hold();
  }
  ~Reader() override {
    try {
      Synchronize(impl_.stream);  // the sorted arrays may still be read
    } catch (const CudaError&) {
    }
    impl_.mutex.Release();
  }

  const TableChanges& about() const override { return about_; }
  int64_t num_keys() const override { return num_keys_; }

  void ReadKeys(CallContext context, int64_t num_keys, uint64_t* keys) override {
    const auto lock = Enter(context);
    if (impl_.is_direct()) {
      for (int64_t i = 0; i < num_keys; ++i) {
        keys[i] = impl_.direct.KeyOf(static_cast<uint64_t>(num_read_ + i));
      }
    } else if (num_keys > 0) {
      CopyToHost(impl_.stream, keys, sorted_keys_.as<uint64_t>() + num_read_,
                 static_cast<size_t>(num_keys) * sizeof(uint64_t));
    }
    num_read_ += num_keys;
  }

  void ReadRows(CallContext context, int64_t first, const uint64_t*, int64_t num_keys, float* rows,
                float* slot_rows, int64_t* records) const override {
    if (num_keys == 0) return;
    const auto lock = Enter(context);
    Buffer listed;
    const uint32_t* row_numbers = sorted_rows_.as<uint32_t>() + first;
    if (impl_.is_direct()) {
      listed = Buffer(static_cast<size_t>(num_keys) * sizeof(uint32_t), impl_.stream);
      ListRowNumbers(impl_.stream, first, num_keys, listed.as<uint32_t>());
      row_numbers = listed.as<uint32_t>();
    }
    if (rows != nullptr || slot_rows != nullptr) CopyRows(row_numbers, num_keys, rows, slot_rows);
    if (records != nullptr) impl_.ReadRecords(row_numbers, num_keys, records);
  }

 private:
  [[nodiscard]] std::unique_lock<HeldMutex> Enter(CallContext context) const {
    impl_.mutex.LockHeld();
    std::unique_lock<HeldMutex> lock(impl_.mutex, std::adopt_lock);
    impl_.Use(context.stream());
    return lock;
  }

  void SortKeys() {
    const Stream stream = impl_.stream;
    const size_t key_bytes = static_cast<size_t>(num_keys_) * sizeof(uint64_t);
    sorted_keys_ = Buffer(key_bytes, stream);
    sorted_rows_ = Buffer(key_bytes / 2, stream);
    // Temporary memory, also for CUB: so much scratch should not stay with the table.
    const Buffer keys(key_bytes, stream), rows(key_bytes / 2, stream);
    Workspace scratch;
    const Workspace::Scope scope(scratch, stream);
    uint32_t* const cursor = scratch.Take<uint32_t>(1);
    FillWithZeros(stream, cursor, sizeof(uint32_t));
    ListKeys(stream, impl_.Ref().index, keys.as<uint64_t>(), rows.as<uint32_t>(), cursor);
    SortPairs(stream, scratch, keys.as<uint64_t>(), sorted_keys_.as<uint64_t>(),
              rows.as<uint32_t>(), sorted_rows_.as<uint32_t>(), num_keys_, 64);
  }

  void CopyRows(const uint32_t* row_numbers, int64_t num_rows, float* rows,
                float* slot_rows) const {
    const Stream stream = impl_.stream;
    const TableRef ref = impl_.Ref();
    const int64_t width = ref.row_floats, dim = ref.dim;
    const int64_t slot_width = about_.snapshot.slot_width();
    const int64_t piece_rows = std::min(num_rows, std::max<int64_t>(1, kPieceFloats / width));
    const HostBuffer whole_rows(static_cast<size_t>(piece_rows * width) * sizeof(float));
    const Buffer piece(whole_rows.bytes(), stream);
    for (int64_t begin = 0; begin < num_rows; begin += piece_rows) {
      const int64_t n = std::min(piece_rows, num_rows - begin);
      CopyWholeRows(stream, ref, row_numbers + begin, n, piece.as<float>());
      CopyToHost(stream, whole_rows.as<float>(), piece.data(),
                 static_cast<size_t>(n * width) * sizeof(float));
      for (int64_t i = 0; i < n; ++i) {
        const float* const row = whole_rows.as<float>() + i * width;
        if (rows != nullptr) std::copy_n(row, dim, rows + (begin + i) * dim);
        if (slot_rows == nullptr || slot_width == 0) continue;
        CopySavedSlots(impl_.slots, row + dim, slot_rows + (begin + i) * slot_width);
      }
    }
  }

  Impl& impl_;
  const int64_t num_keys_;
  TableChanges about_;
  Buffer sorted_keys_, sorted_rows_;
  int64_t num_read_ = 0;
};

std::unique_ptr<TableReader> CudaTable::OpenContent(CallContext context, bool with_slots,
                                                    bool evict) {
  const auto lock = impl_->Enter(context.stream());
  if (evict && impl_->options.policy.evicts_on_call()) impl_->Evict();
  impl_->CatchUpAll();
  impl_->LearnCounters();
  return std::make_unique<Reader>(*impl_, with_slots);
}

}  // namespace cuda
}  // namespace sok
