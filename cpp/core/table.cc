#include "cpp/core/table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace sok {
namespace {

void CheckLength(size_t received, size_t required, const char* what, const std::string& table) {
  if (received == required) return;
  throw std::invalid_argument(
      std::string("Import: `") + what + "` must hold " + std::to_string(required) +
      " values. Received: " + std::to_string(received) + " (table '" + table + "')");
}

}  // namespace

Executor& CallContext::threads() const {
  if (threads_ != nullptr) return *threads_;
  throw std::logic_error("A table in host memory was called on a stream of a device");
}

CUstream_st* CallContext::stream() const {
  if (threads_ == nullptr) return stream_;
  throw std::logic_error("A table in device memory was called on threads of the host");
}

TableSnapshot Table::Export(CallContext context, bool with_slots, bool evict) {
  const std::unique_ptr<TableReader> reader = OpenContent(context, with_slots, evict);
  TableSnapshot snapshot = reader->about().snapshot;
  const int64_t num_keys = reader->num_keys();
  snapshot.keys.resize(static_cast<size_t>(num_keys));
  snapshot.rows.resize(static_cast<size_t>(num_keys * dim()));
  snapshot.slot_rows.resize(static_cast<size_t>(num_keys * snapshot.slot_width()));
  if (keeps_records()) snapshot.policy.records.resize(static_cast<size_t>(3 * num_keys));
  reader->ReadKeys(context, num_keys, snapshot.keys.data());
  // If `with_slots` is false, null even if the table has slots.
  reader->ReadRows(context, 0, snapshot.keys.data(), num_keys, snapshot.rows.data(),
                   snapshot.slot_rows.empty() ? nullptr : snapshot.slot_rows.data(),
                   keeps_records() ? snapshot.policy.records.data() : nullptr);
  return snapshot;
}

std::unique_ptr<TableReader> Table::OpenChanges(CallContext, int64_t, bool) {
  throw std::invalid_argument(
      "Deltas are supported only for tables in host memory (create them under `with "
      "tf.device(\"/CPU:0\"):`). Received: table '" +
      options().name + "' in device memory");
}

int64_t Table::KeepChanges(CallContext) { return 0; }

void RequireHashtable(const TableOptions& options) {
  if (options.use_hashtable) return;
  throw std::invalid_argument("Erase needs a table with a hashtable. Received: table '" +
                              options.name + "' with use_hashtable=false");
}

void CheckSnapshot(const TableSnapshot& snapshot, const TableOptions& options) {
  const size_t num_keys = snapshot.keys.size();
  CheckLength(snapshot.rows.size(), num_keys * options.dim, "rows", options.name);
  CheckLength(snapshot.slot_widths.size(), snapshot.slot_names.size(), "slot_widths", options.name);
  CheckLength(snapshot.slot_rows.size(), num_keys * snapshot.slot_width(), "slot_rows",
              options.name);
  CheckSnapshotRecords(static_cast<int64_t>(snapshot.policy.records.size()),
                       static_cast<int64_t>(num_keys), options.name);
}

std::vector<SlotVariableSpec> SlotsWithThoseOf(const TableSnapshot& snapshot,
                                               const std::vector<SlotVariableSpec>& slots,
                                               SlotsAreOf owner, const TableOptions& options) {
  std::vector<SlotVariableSpec> merged = slots, imported;
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    imported.push_back({snapshot.slot_names[s], snapshot.slot_widths[s],
                        std::numeric_limits<float>::quiet_NaN(), true});
  }
  CheckSlots(imported, options.name);
  if (owner != SlotsAreOf::kContent && IsOfAnotherRule(imported, snapshot.optimizer_step, slots)) {
    if (owner == SlotsAreOf::kExpectedRule) return imported;
    throw std::invalid_argument(
        "Import: content that is added to a table must be of the table's optimizer. Received: "
        "slot variables of another (table '" +
        options.name + "')");
  }
  for (const SlotVariableSpec& slot : imported) {
    const auto present =
        std::find_if(slots.begin(), slots.end(),
                     [&slot](const SlotVariableSpec& other) { return other.name == slot.name; });
    if (present == slots.end()) {
      merged.push_back(slot);
    } else if (present->width != slot.width) {
      throw std::invalid_argument("Import: slot variable '" + slot.name + "' must have width " +
                                  std::to_string(present->width) + ". Received: " +
                                  std::to_string(slot.width) + " (table '" + options.name + "')");
    }
  }
  return merged;
}

void NameSavedSlots(const std::vector<SlotVariableSpec>& slots, TableSnapshot* snapshot) {
  for (const SlotVariableSpec& slot : slots) {
    if (!slot.saved) continue;
    snapshot->slot_names.push_back(slot.name);
    snapshot->slot_widths.push_back(slot.width);
  }
}

}  // namespace sok
