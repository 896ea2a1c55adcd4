// Import into a CudaTable, also aside, to replace its content. Export is in table_reader.cu.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "cpp/core/cuda/device/host_buffer.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table.h"
#include "cpp/core/cuda/table/table_impl.h"

namespace sok {
namespace cuda {

namespace {

// The positions of a snapshot that are used: of equal keys the last, in the place of the first.
std::vector<int64_t> LastPositions(const std::vector<uint64_t>& keys) {
  std::vector<int64_t> positions;
  std::unordered_map<uint64_t, size_t> places(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto [entry, is_new] = places.emplace(keys[i], positions.size());
    if (is_new) positions.push_back(0);
    positions[entry->second] = static_cast<int64_t>(i);
  }
  return positions;
}

}  // namespace

void CudaTable::Import(CallContext context, const TableSnapshot& snapshot, bool replace) {
  Impl& impl = *impl_;
  const Stream stream = context.stream();
  if (replace) {
    const std::unique_ptr<Table> aside = MakeAside(context);
    aside->Import(context, snapshot);
    return TakeContent(context, *aside);
  }
  CheckSnapshot(snapshot, impl.options);
  const auto lock = impl.Enter(stream);
  if (impl.records != nullptr && impl.records->is_bloom()) {
    CheckBloomCounters(impl.records->bloom, snapshot.policy.counters);
  }
  const SlotsAreOf owner = impl.history != nullptr ? SlotsAreOf::kRule
                           : impl.is_aside         ? SlotsAreOf::kExpectedRule
                                                   : SlotsAreOf::kContent;
  const std::vector<SlotVariableSpec> specs =
      SlotsWithThoseOf(snapshot, impl.slots, owner, impl.options);
  impl.CatchUpAll();
  ConfigureSlots(stream, specs);

  const std::vector<int64_t> positions = LastPositions(snapshot.keys);
  const int64_t num_keys = static_cast<int64_t>(positions.size());
  std::vector<uint64_t> host_keys;
  RecordSnapshot policy = snapshot.policy;
  policy.records.clear();
  for (int64_t position : positions) {
    host_keys.push_back(snapshot.keys[position]);
    if (snapshot.policy.records.empty()) continue;
    const auto record = snapshot.policy.records.begin() + 3 * position;
    policy.records.insert(policy.records.end(), record, record + 3);
  }
  Buffer keys(static_cast<size_t>(num_keys) * sizeof(uint64_t), stream);
  Buffer row_numbers(static_cast<size_t>(num_keys) * sizeof(uint32_t), stream);
  CopyToDevice(stream, keys.data(), host_keys.data(), keys.bytes());
  // In one piece, so that all of it fits or nothing is changed. An empty table makes room for all
  // keys first, and then takes more of them than a batch may have.
  const bool fits = impl.is_direct() || (Size(stream) == 0 && num_keys <= impl.most());
  if (fits) Reserve(stream, num_keys);
  const int64_t piece_keys = fits ? kPieceKeys : std::max<int64_t>(1, num_keys);
  for (int64_t first = 0; first < num_keys; first += piece_keys) {
    FindOrInsertRows(stream, keys.as<uint64_t>() + first, std::min(piece_keys, num_keys - first),
                     row_numbers.as<uint32_t>() + first, nullptr);
  }

  // Whole rows: slots that the snapshot lacks get the table's initial values.
  const int64_t width = row_floats(), slot_width = snapshot.slot_width();
  std::vector<int64_t> offsets;
  for (const std::string& name : snapshot.slot_names) {
    offsets.push_back(OffsetOfSlot(specs, dim(), name));
  }
  const int64_t piece_rows = std::min(num_keys, std::max<int64_t>(1, kPieceFloats / width));
  const HostBuffer whole_rows(static_cast<size_t>(piece_rows * width) * sizeof(float));
  const Buffer piece(whole_rows.bytes(), stream);
  for (int64_t first = 0; first < num_keys; first += piece_rows) {
    const int64_t n = std::min(piece_rows, num_keys - first);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t position = positions[first + i];
      float* const row = whole_rows.as<float>() + i * width;
      std::copy_n(snapshot.rows.data() + position * dim(), dim(), row);
      std::copy(impl.slot_initial.begin(), impl.slot_initial.end(), row + dim());
      const float* slot_row = snapshot.slot_rows.data() + position * slot_width;
      for (size_t s = 0; s < offsets.size(); ++s) {
        for (int64_t k = 0; k < snapshot.slot_widths[s]; ++k, ++slot_row) {
          if (!std::isnan(*slot_row)) row[offsets[s] + k] = *slot_row;  // else the initial value
        }
      }
    }
    CopyToDevice(stream, piece.data(), whole_rows.as<float>(),
                 static_cast<size_t>(n * width) * sizeof(float));
    WriteRows(stream, impl.Ref(), row_numbers.as<uint32_t>() + first, nullptr, n, width,
              piece.as<float>());
  }
  if (impl.records != nullptr) {
    impl.ImportRecords(policy, keys.as<uint64_t>(), row_numbers.as<uint32_t>(), num_keys);
  }
  if (impl.options.policy.evicts_by_score()) surplus_ += impl.EvictSurplus();
  if (snapshot.optimizer_step >= 0) impl.step_number.ResumeFrom(snapshot.optimizer_step);
  if (snapshot.initial_row_scale >= 0.0) impl.initial_row_scale = snapshot.initial_row_scale;
  Synchronize(stream);
}

std::unique_ptr<Table> CudaTable::MakeAside(CallContext context) const {
  const double max_load_factor = impl_->max_load_factor;
  auto aside = std::make_unique<CudaTable>(options(), max_load_factor, context.stream());
  std::vector<SlotVariableSpec> of_rule;
  {
    const auto lock = impl_->Enter(context.stream());
    if (impl_->history != nullptr) of_rule = impl_->slots;
  }
  aside->ConfigureSlots(context, of_rule);
  aside->impl_->is_aside = true;
  aside->impl_->initial_row_scale = InitialRowScale(context);  // unless the content has its own
  return aside;
}

void CudaTable::Impl::SwapContent(Impl& other) noexcept {
  std::swap(buckets, other.buckets);
  std::swap(num_buckets, other.num_buckets);
  std::swap(arena, other.arena);
  std::swap(counters, other.counters);
  std::swap(free_rows, other.free_rows);
  std::swap(used, other.used);
  std::swap(rows, other.rows);
  std::swap(size, other.size);
  slots.swap(other.slots);
  slot_initial.swap(other.slot_initial);
  std::swap(device_slot_initial, other.device_slot_initial);
  std::swap(step_number, other.step_number);
  records.swap(other.records);
}

void CudaTable::TakeContent(CallContext context, Table& other) {
  const Stream stream = context.stream();
  Impl &impl = *impl_, &aside = *static_cast<CudaTable&>(other).impl_;
  const auto lock = impl.Enter(stream);
  const auto aside_lock = aside.Enter(stream);
  const bool stays = impl.history != nullptr &&
                     !IsOfAnotherRule(aside.slots, aside.step_number.last(), impl.slots);
  // The optimizer may have attached meanwhile: it expects its slots at their places.
  if (stays) other.ConfigureSlots(context, impl.slots);
  impl.ForgetSteps();  // no row owes anything any more
  // The next step attaches an optimizer, and may find that the content is of another rule.
  if (!stays) impl.history = nullptr;
  impl.LearnCounters();
  aside.LearnCounters();
  surplus_ += other.TakeSurplus();
  impl.SwapContent(aside);
  impl.initial_row_scale = aside.initial_row_scale;
}

}  // namespace cuda
}  // namespace sok
