// Export and import of a CudaTable.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/direct.cuh"
#include "cpp/core/cuda/index.cuh"
#include "cpp/core/cuda/primitives.h"
#include "cpp/core/cuda/rows_ops.cuh"
#include "cpp/core/cuda/table.h"
#include "cpp/core/cuda/table_impl.h"

namespace sok {
namespace cuda {

void CudaTable::Export(Stream stream, std::vector<uint64_t>* host_keys,
                       std::vector<float>* host_rows) {
  Export(stream, host_keys, host_rows, nullptr);
}

void CudaTable::Export(Stream stream, std::vector<uint64_t>* host_keys,
                       std::vector<float>* host_rows, RecordSnapshot* policy, bool evict) {
  Impl& impl = *impl_;
  impl.Use(stream);
  if (evict && impl.options.policy.evicts_on_call()) impl.Evict();
  if (policy != nullptr) *policy = RecordSnapshot();
  const int64_t num_keys = Size(stream);
  impl.CatchUpAll();
  const int64_t width = row_floats();
  host_keys->resize(static_cast<size_t>(num_keys));
  host_rows->resize(static_cast<size_t>(num_keys * width));
  if (num_keys == 0 && (policy == nullptr || impl.records == nullptr)) return;
  // Memory of their own, CUB's included: this much scratch should not stay with the table.
  const size_t key_bytes = static_cast<size_t>(num_keys) * sizeof(uint64_t);
  const Buffer keys(key_bytes, stream), sorted_keys(key_bytes, stream);
  const Buffer rows(key_bytes / 2, stream), sorted_rows(key_bytes / 2, stream);
  Workspace scratch;
  const Workspace::Scope scope(scratch, stream);
  uint32_t* const cursor = scratch.Take<uint32_t>(1);
  Check(cudaMemsetAsync(cursor, 0, sizeof(uint32_t), stream), "cudaMemsetAsync");
  const TableRef ref = impl.Ref();
  if (impl.is_direct()) {
    impl.ListDirectKeys(host_keys, sorted_rows.as<uint32_t>());
  } else {
    ListKeys(stream, ref.index, keys.as<uint64_t>(), rows.as<uint32_t>(), cursor);
    SortPairs(stream, scratch, keys.as<uint64_t>(), sorted_keys.as<uint64_t>(), rows.as<uint32_t>(),
              sorted_rows.as<uint32_t>(), num_keys, 64);
    CopyToHost(stream, host_keys->data(), sorted_keys.data(), key_bytes);
  }
  if (policy != nullptr && impl.records != nullptr) {
    impl.ExportRecords(sorted_rows.as<uint32_t>(), num_keys, policy);
  }
  const int64_t piece_rows = std::max<int64_t>(1, kPieceFloats / width);
  const Buffer piece(static_cast<size_t>(std::min(piece_rows, num_keys) * width) * sizeof(float),
                     stream);
  for (int64_t first = 0; first < num_keys; first += piece_rows) {
    const int64_t n = std::min(piece_rows, num_keys - first);
    CopyWholeRows(stream, ref, sorted_rows.as<uint32_t>() + first, n, piece.as<float>());
    CopyToHost(stream, host_rows->data() + first * width, piece.data(),
               static_cast<size_t>(n * width) * sizeof(float));
  }
}

void CudaTable::Import(Stream stream, const uint64_t* host_keys, int64_t num_keys,
                       const float* host_rows) {
  Import(stream, host_keys, num_keys, host_rows, RecordSnapshot());
}

void CudaTable::Import(Stream stream, const uint64_t* host_keys, int64_t num_keys,
                       const float* host_rows, const RecordSnapshot& policy, bool replace) {
  Impl& impl = *impl_;
  impl.Use(stream);
  if (impl.records != nullptr) impl.CheckRecords(policy, num_keys);
  if (replace) Clear(stream);
  impl.CatchUpAll();
  Buffer keys(static_cast<size_t>(num_keys) * sizeof(uint64_t), stream);
  Buffer row_numbers(static_cast<size_t>(num_keys) * sizeof(uint32_t), stream);
  CopyToDevice(stream, keys.data(), host_keys, keys.bytes());
  // In one piece, so that all of it fits or nothing is changed.
  FindOrInsertRows(stream, keys.as<uint64_t>(), num_keys, row_numbers.as<uint32_t>(), nullptr);
  const int64_t width = row_floats();
  const int64_t piece_rows = std::max<int64_t>(1, kPieceFloats / width);
  const Buffer piece(static_cast<size_t>(std::min(piece_rows, num_keys) * width) * sizeof(float),
                     stream);
  for (int64_t first = 0; first < num_keys; first += piece_rows) {
    const int64_t n = std::min(piece_rows, num_keys - first);
    CopyToDevice(stream, piece.data(), host_rows + first * width,
                 static_cast<size_t>(n * width) * sizeof(float));
    WriteRows(stream, impl.Ref(), row_numbers.as<uint32_t>() + first, nullptr, n, width,
              piece.as<float>());
  }
  if (impl.records != nullptr) {
    impl.ImportRecords(policy, keys.as<uint64_t>(), row_numbers.as<uint32_t>(), num_keys);
  }
  Synchronize(stream);
}

}  // namespace cuda
}  // namespace sok
