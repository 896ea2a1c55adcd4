// A table's content in parts, out of it and into a table aside: for Python, which reads and writes
// the files. An op hands the table over as a number. The functions below, called by ctypes, take
// this number, so the whole table is never copied. sok_like/table/table_reader.py calls them.
//
// Each function returns null, or the error ("CODE: message"), valid until the thread's next call.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpp/tf/common.h"
#include "cpp/tf/snapshots.h"

#define SOK_EXPORTED extern "C" __attribute__((visibility("default")))

namespace sok {
namespace {

// What a number stands for. It does not keep the table alive: a cancelled session may never ask for
// it.
struct Handed {
  tensorflow::core::WeakPtr<TableResource> table;
  TableRunner run;
  bool with_slots = true, evict = false;
};

std::mutex mutex;  // guards last_number and the two maps
int64_t last_number = 0;
std::map<int64_t, Handed>& HandedTables() {
  static auto* const tables = new std::map<int64_t, Handed>;
  return *tables;
}
// A table made aside for another one, until an op takes it.
struct Made {
  const TableResource* owner;
  std::shared_ptr<Table> table;
};
std::map<int64_t, Made>& MadeTables() {
  static auto* const tables = new std::map<int64_t, Made>;
  return *tables;
}

const char* Told(const absl::Status& status) {
  static thread_local std::string text;
  if (status.ok()) return nullptr;
  text = status.ToString();
  return text.c_str();
}

absl::Status Take(int64_t number, Handed* handed, TablePtr* table) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = HandedTables().find(number);
  if (found == HandedTables().end()) {
    return absl::InvalidArgumentError(absl::StrCat("no table is registered under number ", number));
  }
  *handed = std::move(found->second);
  HandedTables().erase(found);
  *table = handed->table.GetNewRef();
  if (*table == nullptr) return absl::InvalidArgumentError("the table has been deleted");
  return absl::OkStatus();
}

}  // namespace

std::shared_ptr<Table> TakeMadeAside(int64_t number) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = MadeTables().find(number);
  if (found == MadeTables().end()) return nullptr;
  std::shared_ptr<Table> made = std::move(found->second.table);
  MadeTables().erase(found);
  return made;
}

void DropMadeAside(const TableResource* owner) {
  std::vector<std::shared_ptr<Table>> dropped;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto made = MadeTables().begin(); made != MadeTables().end();) {
    if (made->second.owner == owner) dropped.push_back(std::move(made->second.table));
    made = made->second.owner == owner ? MadeTables().erase(made) : std::next(made);
  }
}

TableResource::~TableResource() { DropMadeAside(this); }

REGISTER_OP("SokTableHandOver")
    .Input("handle: resource")
    .Output("number: int64")
    .Attr("with_slots: bool = true")
    .Attr("evict: bool = false")
    .SetShapeFn(ScalarShape)
    .SetIsStateful()
    .Doc(
        "A number by which functions called from Python find the table, once. They read it with "
        "slots or without; `evict` as in SokTableExport.");

class TableHandOverOp : public OpKernel {
 public:
  explicit TableHandOverOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("with_slots", &with_slots_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("evict", &evict_));
  }
  void Compute(OpKernelContext* ctx) override {
    TablePtr table;
    OP_REQUIRES_OK(ctx, LookupTable(ctx, &table));
    Handed handed;
    handed.table = tensorflow::core::WeakPtr<TableResource>(table.get());
    handed.run = table->RunnerOf(ctx);
    handed.with_slots = with_slots_;
    handed.evict = evict_;
    Tensor* number;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &number));
    const std::lock_guard<std::mutex> lock(mutex);
    number->scalar<int64_t>()() = ++last_number;
    HandedTables()[last_number] = std::move(handed);
  }

 private:
  bool with_slots_, evict_;
};
SOK_REGISTER_TABLE_KERNEL(Name("SokTableHandOver").HostMemory("handle").HostMemory("number"),
                          TableHandOverOp);

// ---- out of a table ----

struct Stream {
  TablePtr table;  // outlives the reader
  TableRunner run;
  std::unique_ptr<TableReader> reader;
  std::vector<const char*> names;
  std::vector<double> steps;
};

// What is not read in parts; pointers are valid until sok_stream_close.
struct StreamContent {
  int64_t num_keys, slot_width, num_slots, has_records, num_waiting, num_counters, step,
      optimizer_step, num_erased, whole, num_steps;
  double initial_row_scale;
  const char* const* slot_names;
  const int64_t* slot_widths;
  const WaitingKey* waiting;  // three int64 each
  const int64_t* counters;
  const uint64_t* erased;
  const double* steps;  // [num_steps, 3]
  const char* optimizer;
};

// since -1: the content; else what changed since that instant, as Table::OpenChanges. `instant`: its
// number, if the table logs changes.
SOK_EXPORTED const char* sok_stream_open(int64_t number, int64_t since, bool beside,
                                         Stream** opened, int64_t* instant) {
  auto stream = std::make_unique<Stream>();
  Handed handed;
  absl::Status status = Take(number, &handed, &stream->table);
  if (!status.ok()) return Told(status);
  stream->run = handed.run;
  Table& table = stream->table->table();
  status = stream->run([&](CallContext context) {
    stream->reader = since >= 0 ? table.OpenChanges(context, since, beside)
                                : table.OpenContent(context, handed.with_slots, handed.evict);
    for (const StepRun& run : stream->reader->about().steps) {
      stream->steps.insert(stream->steps.end(), {static_cast<double>(run.count), run.learning_rate,
                                                 static_cast<double>(run.step)});
    }
    const TableSnapshot& snapshot = stream->reader->about().snapshot;
    for (const std::string& name : snapshot.slot_names) stream->names.push_back(name.c_str());
  });
  if (!status.ok()) return Told(status);
  *instant = stream->reader->about().number;
  *opened = stream.release();
  return nullptr;
}

SOK_EXPORTED const char* sok_stream_about(Stream* stream, StreamContent* content) {
  const absl::Status status = Guard([&] { stream->reader->ReadWaiting(); });
  if (!status.ok()) return Told(status);
  const TableChanges& about = stream->reader->about();
  const TableSnapshot& all = about.snapshot;
  const auto size = [](const auto& values) { return static_cast<int64_t>(values.size()); };
  *content = {stream->reader->num_keys(),
              all.slot_width(),
              size(all.slot_names),
              stream->table->table().keeps_records(),
              size(all.policy.waiting),
              size(all.policy.counters),
              all.policy.step,
              all.optimizer_step,
              size(about.erased),
              about.whole,
              size(about.steps),
              all.initial_row_scale,
              stream->names.data(),
              all.slot_widths.data(),
              all.policy.waiting.data(),
              all.policy.counters.data(),
              about.erased.data(),
              stream->steps.data(),
              about.optimizer.c_str()};
  return nullptr;
}

SOK_EXPORTED const char* sok_stream_keys(Stream* stream, int64_t num_keys, uint64_t* keys) {
  return Told(
      stream->run([&](CallContext context) { stream->reader->ReadKeys(context, num_keys, keys); }));
}

SOK_EXPORTED const char* sok_stream_rows(Stream* stream, int64_t first, const uint64_t* keys,
                                         int64_t num_keys, float* rows, float* slot_rows,
                                         int64_t* records) {
  return Told(stream->run([&](CallContext context) {
    stream->reader->ReadRows(context, first, keys, num_keys, rows, slot_rows, records);
  }));
}

SOK_EXPORTED void sok_stream_hurry(Stream* stream) { stream->reader->Hurry(); }

SOK_EXPORTED void sok_stream_close(Stream* stream) {
  stream->run([&](CallContext) { stream->reader.reset(); }).IgnoreError();
  delete stream;
}

// ---- into a table aside ----

struct MadeAside {
  TablePtr table;
  TableRunner run;
  std::shared_ptr<Table> aside;
  TableSnapshot part;  // its memory serves one part after the other
};

// The table aside will hold `num_keys` keys.
SOK_EXPORTED const char* sok_aside_open(int64_t number, int64_t num_keys, MadeAside** opened) {
  auto made = std::make_unique<MadeAside>();
  Handed handed;
  absl::Status status = Take(number, &handed, &made->table);
  if (status.ok()) status = CheckReplacement(made->table->options(), num_keys);
  if (!status.ok()) return Told(status);
  // A cancelled session may have left a table; so at most one is ever left.
  DropMadeAside(made->table.get());
  made->run = handed.run;
  status = made->run([&](CallContext context) {
    made->aside = made->table->table().MakeAside(context);
    const int64_t most = made->table->options().max_capacity;
    made->aside->Reserve(context, most > 0 ? std::min(num_keys, most) : num_keys);
  });
  if (!status.ok()) return Told(status);
  *opened = made.release();
  return nullptr;
}

// Imports one part. slot_rows [num_keys, sum of slot_widths]; records [num_keys, 3] or null.
SOK_EXPORTED const char* sok_aside_import(MadeAside* made, int64_t num_keys, const uint64_t* keys,
                                          const float* rows, const float* slot_rows,
                                          int64_t num_slots, const char* const* slot_names,
                                          const int64_t* slot_widths, const int64_t* records,
                                          int64_t num_waiting, const int64_t* waiting,
                                          int64_t num_counters, const int64_t* counters,
                                          int64_t step, int64_t optimizer_step,
                                          double initial_row_scale) {
  return Told(made->run([&](CallContext context) {
    TableSnapshot& part = made->part;
    part.slot_names.assign(slot_names, slot_names + num_slots);
    part.slot_widths.assign(slot_widths, slot_widths + num_slots);
    part.keys.assign(keys, keys + num_keys);
    part.rows.assign(rows, rows + num_keys * made->aside->dim());
    part.slot_rows.assign(slot_rows, slot_rows + num_keys * part.slot_width());
    part.policy.records.assign(records, records + (records == nullptr ? 0 : 3 * num_keys));
    part.policy.waiting.clear();
    for (int64_t i = 0; i < 3 * num_waiting; i += 3) {
      part.policy.waiting.push_back(
          {static_cast<uint64_t>(waiting[i]), waiting[i + 1], waiting[i + 2]});
    }
    part.policy.counters.assign(counters, counters + num_counters);
    part.policy.step = step;
    part.optimizer_step = optimizer_step;
    part.initial_row_scale = initial_row_scale;
    made->aside->Import(context, part);
  }));
}

// The number by which SokTableReadAside takes the table; `made` must still be closed.
SOK_EXPORTED int64_t sok_aside_keep(MadeAside* made) {
  const std::lock_guard<std::mutex> lock(mutex);
  MadeTables()[++last_number] = {made->table.get(), std::move(made->aside)};
  return last_number;
}

// Frees a table that no op will take, because another rank has failed.
SOK_EXPORTED void sok_aside_drop(int64_t number) { TakeMadeAside(number); }

SOK_EXPORTED void sok_aside_close(MadeAside* made) { delete made; }

}  // namespace sok
