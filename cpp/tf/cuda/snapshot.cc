#include "cpp/tf/cuda/snapshot.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace sok {
namespace {

// A slot variable inside whole rows.
struct Place {
  int64_t offset;  // floats from the row
  int64_t width;
};

Place PlaceOf(const std::vector<SlotSpec>& specs, int64_t dim, const std::string& name) {
  int64_t offset = dim;
  for (const SlotSpec& spec : specs) {
    if (spec.name == name) return {offset, spec.width};
    offset += spec.width;
  }
  return {-1, 0};
}

// The table's slots and those of the snapshot that it lacks. Of these the initial value is NaN, not
// known, until an optimizer says it.
std::vector<SlotSpec> MergedSlots(const cuda::CudaTable& table, const TableSnapshot& snapshot) {
  std::vector<SlotSpec> specs = table.slots();
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    const std::string& name = snapshot.slot_names[s];
    const int64_t width = snapshot.slot_widths[s];
    const Place present = PlaceOf(specs, table.dim(), name);
    if (present.offset < 0) {
      specs.push_back({name, width, std::numeric_limits<float>::quiet_NaN(), true});
    } else if (present.width != width) {
      throw std::invalid_argument(
          "Import: slot variable '" + name + "' must have width " + std::to_string(present.width) +
          ". Received: " + std::to_string(width) + " (table '" + table.options().name + "')");
    }
  }
  return specs;
}

}  // namespace

TableSnapshot ExportSnapshot(cuda::CudaTable& table, cuda::Stream stream, bool with_slots,
                             bool evict) {
  TableSnapshot snapshot;
  std::vector<float> whole_rows;
  table.Export(stream, &snapshot.keys, &whole_rows, &snapshot.policy, evict);
  const int64_t dim = table.dim(), width = table.row_floats();
  const std::vector<SlotSpec> slots = table.slots();
  std::vector<Place> places;
  for (const SlotSpec& spec : slots) {
    if (!with_slots || !spec.saved) continue;
    snapshot.slot_names.push_back(spec.name);
    snapshot.slot_widths.push_back(spec.width);
    places.push_back(PlaceOf(slots, dim, spec.name));
  }
  snapshot.rows.reserve(snapshot.keys.size() * dim);
  for (size_t i = 0; i < snapshot.keys.size(); ++i) {
    const float* const row = whole_rows.data() + i * width;
    snapshot.rows.insert(snapshot.rows.end(), row, row + dim);
    for (const Place& place : places) {
      const float* const slot = row + place.offset;
      snapshot.slot_rows.insert(snapshot.slot_rows.end(), slot, slot + place.width);
    }
  }
  return snapshot;
}

void ImportSnapshot(cuda::CudaTable& table, cuda::Stream stream, const TableSnapshot& snapshot,
                    bool replace) {
  const size_t num_records = snapshot.policy.records.size();
  if (num_records != 0 && num_records != 3 * snapshot.keys.size()) {
    throw std::invalid_argument("Import: `records` must hold " +
                                std::to_string(3 * snapshot.keys.size()) +
                                " values. Received: " + std::to_string(num_records) + " (table '" +
                                table.options().name + "')");
  }
  const std::vector<SlotSpec> specs = MergedSlots(table, snapshot);
  table.ConfigureSlots(stream, specs);
  const int64_t dim = table.dim(), width = table.row_floats();
  std::vector<float> new_row(dim);  // the table's own initial values behind each row
  for (const SlotSpec& spec : specs) new_row.insert(new_row.end(), spec.width, spec.initial);
  std::vector<Place> places;
  for (const std::string& name : snapshot.slot_names) {
    places.push_back(PlaceOf(specs, dim, name));
  }
  // Of equal keys the last wins, in the place of the first.
  RecordSnapshot policy = snapshot.policy;
  policy.records.clear();
  const bool has_records = !snapshot.policy.records.empty();
  std::vector<uint64_t> keys;
  std::vector<float> whole_rows;
  std::unordered_map<uint64_t, size_t> seen(snapshot.keys.size());
  const float* slot = snapshot.slot_rows.data();
  for (size_t i = 0; i < snapshot.keys.size(); ++i) {
    std::copy_n(snapshot.rows.data() + i * dim, dim, new_row.data());
    for (const Place& place : places) {
      std::copy_n(slot, place.width, new_row.data() + place.offset);
      slot += place.width;
    }
    const auto [entry, is_new] = seen.emplace(snapshot.keys[i], keys.size());
    if (is_new) {
      keys.push_back(snapshot.keys[i]);
      whole_rows.resize(keys.size() * width);
      if (has_records) policy.records.resize(keys.size() * 3);
    }
    std::copy_n(new_row.data(), width, whole_rows.data() + entry->second * width);
    if (has_records) {
      std::copy_n(snapshot.policy.records.data() + i * 3, 3,
                  policy.records.data() + entry->second * 3);
    }
  }
  table.Import(stream, keys.data(), static_cast<int64_t>(keys.size()), whole_rows.data(), policy,
               replace);
}

}  // namespace sok
