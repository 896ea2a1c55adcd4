#include "cpp/core/table.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cpp/core/changes.h"

namespace sok {
namespace {

void CheckLength(size_t received, size_t required, const char* what, const std::string& table) {
  if (received == required) return;
  throw std::invalid_argument(
      std::string("Import: `") + what + "` must hold " + std::to_string(required) +
      " values. Received: " + std::to_string(received) + " (table '" + table + "')");
}

// Of a table that is exported whole.
class SnapshotReader final : public TableReader {
 public:
  SnapshotReader(TableChanges content, int64_t dim) : content_(std::move(content)), dim_(dim) {}

  const TableChanges& about() const override { return content_; }
  int64_t num_keys() const override { return static_cast<int64_t>(content_.snapshot.keys.size()); }

  void ReadKeys(CallContext, int64_t num_keys, uint64_t* keys) override {
    std::copy_n(content_.snapshot.keys.begin() + num_read_, num_keys, keys);
    num_read_ += num_keys;
  }

  void ReadRows(CallContext, int64_t first, const uint64_t*, int64_t num_keys, float* rows,
                float* slot_rows, int64_t* records) const override {
    const TableSnapshot& all = content_.snapshot;
    const int64_t width = all.slot_width();
    const auto copy = [first, num_keys](const auto& from, int64_t n, auto* to) {
      if (to != nullptr) std::copy_n(from.begin() + first * n, num_keys * n, to);
    };
    copy(all.rows, dim_, rows);
    copy(all.slot_rows, width, slot_rows);
    copy(all.policy.records, 3, records);
  }

 private:
  const TableChanges content_;
  const int64_t dim_;
  int64_t num_read_ = 0;
};

}  // namespace

Executor& CallContext::threads() const {
  if (threads_ != nullptr) return *threads_;
  throw std::logic_error("A table in host memory was called on a stream of a device");
}

CUstream_st* CallContext::stream() const {
  if (threads_ == nullptr) return stream_;
  throw std::logic_error("A table in device memory was called on threads of the host");
}

int64_t TableSnapshot::slot_width() const {
  return std::accumulate(slot_widths.begin(), slot_widths.end(), int64_t{0});
}

std::unique_ptr<TableReader> Table::OpenContent(CallContext context, bool with_slots, bool evict) {
  TableChanges content;
  content.snapshot = Export(context, with_slots, evict);
  return std::make_unique<SnapshotReader>(std::move(content), dim());
}

std::unique_ptr<TableReader> Table::OpenChanges(CallContext, int64_t) {
  throw std::invalid_argument(
      "Deltas are kept of tables in host memory, as `with tf.device(\"/CPU:0\"):` makes them. "
      "Received: table '" +
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
                                               const TableOptions& options) {
  std::vector<SlotVariableSpec> merged = slots, imported;
  for (size_t s = 0; s < snapshot.slot_names.size(); ++s) {
    imported.push_back({snapshot.slot_names[s], snapshot.slot_widths[s],
                        std::numeric_limits<float>::quiet_NaN(), true});
  }
  CheckSlots(imported, options.name);
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

std::vector<SlotVariableSpec> SlotsWithThoseOf(const std::vector<SlotVariableSpec>& aside,
                                               const std::vector<SlotVariableSpec>& slots) {
  std::vector<SlotVariableSpec> merged = slots;
  for (const SlotVariableSpec& slot : aside) {
    const auto same = [&slot](const SlotVariableSpec& other) { return other.name == slot.name; };
    if (std::none_of(slots.begin(), slots.end(), same)) merged.push_back(slot);
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
