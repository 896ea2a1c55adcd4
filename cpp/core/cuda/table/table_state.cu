// Memory, slots and optimizer of a CudaTable.
#include <cuda_runtime.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cpp/core/cuda/rows/direct_row_kernels.cuh"
#include "cpp/core/cuda/rows/key_kernels.cuh"
#include "cpp/core/cuda/rows/row_kernels.cuh"
#include "cpp/core/cuda/table/table_impl.h"
#include "cpp/core/hash.h"

namespace sok {
namespace cuda {
namespace {

constexpr int64_t kMaxDim = int64_t{1} << 20;       // the pieces of 32 rows are numbered in 32 bits
constexpr int64_t kChunkFloats = int64_t{1} << 19;  // embeddings of a chunk: 2 MiB

const TableOptions& Validated(const TableOptions& options, double max_load_factor) {
  options.Validate();
  if (options.row_type != RowType::kFloat32) {
    throw std::invalid_argument("The rows of a table in device memory must be float32. Received: " +
                                std::string(RowTypeName(options.row_type)) + " (table '" +
                                options.name + "')");
  }
  if (options.dim > kMaxDim) {
    throw std::invalid_argument("`dim` must be at most 2^20 in device memory. Received: " +
                                std::to_string(options.dim) + " (table '" + options.name + "')");
  }
  if (!(max_load_factor > 0.0 && max_load_factor <= 0.97)) {
    throw std::invalid_argument(
        "`max_load_factor` must be in (0, 0.97]. Received: " + std::to_string(max_load_factor) +
        " (table '" + options.name + "')");
  }
  if (options.storage.is_used()) {
    throw std::invalid_argument(
        "`storage_path` is supported only for tables in host memory (create them under `with "
        "tf.device(\"/CPU:0\"):`). Received: storage_path='" +
        options.storage.path + "' (table '" + options.name + "' in device memory)");
  }
  if (options.policy.count_occurrences && options.policy.keeps_records()) {
    throw std::invalid_argument(
        "`count` must be 'lookups' for a table in device memory; a table in host memory (`with "
        "tf.device(\"/CPU:0\"):`) also supports 'occurrences'. Received: count='occurrences' "
        "(table '" +
        options.name + "')");
  }
  RequireDevice();
  return options;
}

int64_t Padded(int64_t floats) { return (floats + 3) / 4 * 4; }

}  // namespace

// ---- memory ----

int64_t DeviceArena::bytes() const {
  int64_t total = static_cast<int64_t>(pointers.bytes());
  for (const Buffer& slab : slabs) total += static_cast<int64_t>(slab.bytes());
  return total;
}

void DeviceArena::Reserve(Stream stream, int64_t wanted_chunks, int64_t chunk_rows) {
  const int64_t more = wanted_chunks - num_chunks;
  if (more <= 0) return;
  const size_t needed = static_cast<size_t>(wanted_chunks) * sizeof(float*);
  if (needed > pointers.bytes()) {
    Buffer larger(std::max<size_t>(2 * needed, 1024), stream);
    if (num_chunks > 0) {
      CopyOnDevice(stream, larger.data(), pointers.data(), num_chunks * sizeof(float*));
    }
    pointers = std::move(larger);
  }
  const int64_t chunk_floats = chunk_rows * stride;
  slabs.emplace_back(static_cast<size_t>(more * chunk_floats) * sizeof(float), stream);
  SetChunks(stream, pointers.as<float*>(), num_chunks, more, slabs.back().as<float>(),
            chunk_floats);
  num_chunks = wanted_chunks;
}

CudaTable::Impl::Impl(const TableOptions& table_options, double load_factor, Stream first_stream)
    : options(Validated(table_options, load_factor)),
      max_load_factor(load_factor),
      device(CurrentDevice()),
      initializer(MakeInitializer(options.initializer, options.seed,
                                  HashName(options.name.data(), options.name.size()), options.dim)),
      direct(DirectRowsOf(options)),
      stream(first_stream) {
  while ((int64_t{2} << chunk_shift) * options.dim <= kChunkFloats) ++chunk_shift;
  arena.stride = Padded(options.dim);
  if (initializer.default_rows != nullptr) {
    const std::vector<float>& host = options.initializer.default_rows;
    default_rows = Buffer(host.size() * sizeof(float), stream);
    CopyToDevice(stream, default_rows.data(), host.data(), default_rows.bytes());
    initializer.default_rows = default_rows.as<float>();
  }
  counters = Buffer(sizeof(Counters), stream);
  counters.Zero();
  num_buckets = 1;
  ResizeIndex(1);
  own_point = copy_point = std::make_shared<StreamPoint>();
  void* pinned = nullptr;
  CudaCheck(cudaMallocHost(&pinned, sizeof(Counters)), "cudaMallocHost");
  host_counters = static_cast<Counters*>(pinned);
  if (options.policy.keeps_records()) records = std::make_unique<DeviceRecords>(options, stream);
}

CudaTable::Impl::~Impl() {
  OnDevice(device, [this] {
    copy_point->Wait();  // a copy into the pinned memory may be under way
  });
  OnDevice(device, [this] { cudaFreeHost(host_counters); });
}

void CudaTable::Impl::Use(Stream next) {
  const int current = CurrentDevice();
  if (current != device) {
    throw CudaError("The current CUDA device must be the table's: " + std::to_string(device) +
                    ". Received: " + std::to_string(current) + " (table '" + options.name + "')");
  }
  if (next == stream) return;
  OrderAfter(next, stream);
  stream = next;
  for (Buffer* buffer :
       {&buckets, &arena.pointers, &default_rows, &counters, &free_rows, &device_slot_initial}) {
    buffer->MoveTo(next);
  }
  for (Buffer& slab : arena.slabs) slab.MoveTo(next);
  if (history != nullptr) history->MoveTo(next);
  if (records != nullptr) records->MoveTo(next);
  if (records != nullptr && records->waiting != nullptr) records->waiting->impl_->Use(next);
}

std::unique_lock<HeldMutex> CudaTable::Impl::Enter(Stream next) {
  std::unique_lock<HeldMutex> lock(mutex);
  Use(next);
  return lock;
}

TableRef CudaTable::Impl::Ref() const {
  TableRef ref;
  ref.index = IndexRef(buckets.as<Bucket>(), num_buckets);
  ref.chunks = arena.pointers.as<float*>();
  ref.chunk_shift = chunk_shift;
  ref.chunk_mask = static_cast<uint32_t>(chunk_rows() - 1);
  ref.stride = arena.stride;
  ref.dim = options.dim;
  ref.row_floats = options.dim + static_cast<int64_t>(slot_initial.size());
  ref.slot_initial = device_slot_initial.as<float>();
  ref.last_step_offset = ref.row_floats - 1;  // the last slot, if there is one
  ref.initializer = initializer;
  ref.initial_scale = static_cast<float>(initial_row_scale);
  if (history != nullptr) ref.history = history->Ref();
  ref.filters = options.policy.filters();
  ref.no_permission = options.policy.no_permission;
  ref.counters = counters.as<Counters>();
  ref.free_rows = free_rows.as<uint32_t>();
  return ref;
}

CudaTable::CudaTable(const TableOptions& options, double max_load_factor, Stream stream)
    : impl_(new Impl(options, max_load_factor, stream)) {
  if (impl_->is_direct()) impl_->MakeDirectRows();
  if (options.initial_capacity > 0) Reserve(stream, options.initial_capacity);
}

CudaTable::~CudaTable() = default;

const TableOptions& CudaTable::options() const { return impl_->options; }
HeldMutex& CudaTable::mutex() const { return impl_->mutex; }
Stream CudaTable::stream() const { return impl_->stream; }
std::vector<SlotVariableSpec> CudaTable::Slots() const {
  const std::lock_guard<HeldMutex> lock(impl_->mutex);
  return impl_->slots;
}
int64_t CudaTable::row_floats() const { return impl_->Ref().row_floats; }
StepNumber& CudaTable::step_number() const { return impl_->step_number; }
TableRef CudaTable::Ref() const { return impl_->Ref(); }
TableRef CudaTable::Ref(Stream stream) {
  impl_->Use(stream);
  return impl_->Ref();
}
Workspace& CudaTable::workspace() { return impl_->workspace; }

void CudaTable::Clear(CallContext context) {
  Impl& impl = *impl_;
  const Stream stream = context.stream();
  const auto lock = impl.Enter(stream);
  impl.step_number.ResumeFrom(-1);
  impl.ForgetSteps();  // no row owes anything any more
  impl.initial_row_scale = 1.0;
  if (impl.is_direct()) {  // every key stays and gets its initial row
    return WriteInitialRows(stream, impl.Ref(), impl.direct);
  }
  impl.LearnCounters();
  impl.counters.Zero();
  impl.size.Set(0);
  impl.rows.Set(0);
  impl.used.Set(0);
  impl.ResizeIndex(1);
  const int64_t stride = impl.arena.stride;
  impl.arena = DeviceArena();
  impl.arena.stride = stride;
  impl.free_rows = Buffer();
  if (impl.records != nullptr) impl.records->Clear(stream);
}

MemoryStats CudaTable::Stats(CallContext context) const {
  Impl& impl = *impl_;
  const Stream stream = context.stream();
  const auto lock = impl.Enter(stream);
  impl.LearnCounters();
  MemoryStats stats;
  stats.size = impl.size.known();
  stats.capacity = impl.MaxUsed(impl.num_buckets);
  stats.max_capacity = impl.options.max_capacity;
  stats.num_buckets = impl.num_buckets;
  stats.load_factor = static_cast<double>(impl.used.known()) / (impl.num_buckets * kBucketSlots);
  stats.index_bytes = static_cast<int64_t>(impl.buckets.bytes());
  if (impl.is_direct()) {
    stats.capacity = stats.size;
    stats.num_buckets = stats.index_bytes = 0;
    stats.load_factor = 1.0;
  } else if (stats.size > 0) {
    const Workspace::Scope scope(impl.workspace, stream);
    ProbeLengths* const lengths = impl.workspace.Take<ProbeLengths>(1);
    FillWithZeros(stream, lengths, sizeof(ProbeLengths));
    AddProbeLengths(stream, impl.Ref().index, lengths);
    ProbeLengths found;
    CopyToHost(stream, &found, lengths, sizeof(found));
    stats.mean_probe_length = static_cast<double>(found.total) / stats.size;
    stats.max_probe_length = static_cast<int64_t>(found.most);
  }
  stats.arena_bytes = impl.arena.bytes();
  stats.bytes = stats.index_bytes + stats.arena_bytes +
                static_cast<int64_t>(impl.free_rows.bytes() + impl.default_rows.bytes()) +
                (impl.records == nullptr ? 0 : impl.records->bytes(stream));
  return stats;
}

// ---- slots and optimizer ----

void CudaTable::Impl::CatchUpAll() {
  if (history != nullptr && history->pending()) {
    const TableRef ref = Ref();
    CatchUpRows(stream, ref, nullptr, nullptr, Count(rows.bound(), &ref.counters->next_row));
  }
  ForgetSteps();
}

void CudaTable::Impl::ForgetSteps() {
  if (history == nullptr) return;
  initial_row_scale *= history->decay();
  history->Forget(stream);
}

double CudaTable::Impl::InitialRowScale() const {
  return history == nullptr ? initial_row_scale : initial_row_scale * history->decay();
}

double CudaTable::InitialRowScale(CallContext context) const {
  const auto lock = impl_->Enter(context.stream());
  return impl_->InitialRowScale();
}

void CudaTable::ConfigureSlots(CallContext context, const std::vector<SlotVariableSpec>& specs) {
  LayOutSlots(context.stream(), specs, /*keeps=*/true);
}

void CudaTable::LayOutSlots(Stream stream, const std::vector<SlotVariableSpec>& specs, bool keeps) {
  Impl& impl = *impl_;
  const auto lock = impl.Enter(stream);
  if (SameSlots(specs, impl.slots)) return;
  CheckSlots(specs, impl.options.name);

  // Where each column of the new layout comes from in the old one.
  std::vector<int32_t> from_column(static_cast<size_t>(dim()));
  std::iota(from_column.begin(), from_column.end(), 0);
  std::vector<float> initial;
  const std::vector<KeptSlot> kept =
      KeptSlots(keeps ? impl.slots : std::vector<SlotVariableSpec>(), specs, dim());
  for (size_t s = 0; s < specs.size(); ++s) {
    for (int64_t i = 0; i < specs[s].width; ++i) {
      const int32_t column = static_cast<int32_t>(kept[s].offset + i);
      from_column.push_back(kept[s].offset < 0       ? kInitialColumn
                            : kept[s].may_be_unknown ? KeptUnlessUnknown(column)
                                                     : column);
    }
    initial.insert(initial.end(), specs[s].width, specs[s].initial);
  }
  impl.CatchUpAll();
  impl.history = nullptr;

  DeviceArena arena;
  arena.stride = Padded(static_cast<int64_t>(from_column.size()));
  arena.Reserve(stream, impl.arena.num_chunks, impl.chunk_rows());
  Buffer device_initial(initial.size() * sizeof(float), stream);
  CopyToDevice(stream, device_initial.data(), initial.data(), device_initial.bytes());
  Buffer columns(from_column.size() * sizeof(int32_t), stream);
  CopyToDevice(stream, columns.data(), from_column.data(), columns.bytes());
  const TableRef from = impl.Ref();
  TableRef to = from;
  to.chunks = arena.pointers.as<float*>();
  to.stride = arena.stride;
  to.row_floats = static_cast<int64_t>(from_column.size());
  to.slot_initial = device_initial.as<float>();
  MoveRows(stream, from, to, columns.as<int32_t>(),
           Count(impl.rows.bound(), &from.counters->next_row));
  impl.arena = std::move(arena);
  impl.slots = specs;
  impl.slot_initial = std::move(initial);
  impl.device_slot_initial = std::move(device_initial);
}

void CudaTable::CheckOptimizer(const OptimizerOptions& options) const {
  const Impl& impl = *impl_;
  if (impl.history == nullptr || impl.history->options() == options) return;
  throw std::invalid_argument("A table keeps the optimizer of its first step. Table '" +
                              impl.options.name + "' has " + impl.history->options().ToString() +
                              ". Received: " + options.ToString());
}

History& CudaTable::Attach(Stream stream, const OptimizerOptions& options) {
  Impl& impl = *impl_;
  impl.Use(stream);
  CheckOptimizer(options);
  if (impl.history != nullptr) return *impl.history;
  auto history = std::make_unique<History>(options, stream);
  const std::vector<SlotVariableSpec> slots = OptimizerSlots(options, dim()), held = impl.slots;
  const int64_t last = impl.step_number.last();
  const bool starts_anew = IsOfAnotherRule(held, last, slots);
  LayOutSlots(stream, slots, !starts_anew);
  if (starts_anew) {
    impl.step_number.ResumeFrom(0);
    SayThatStateStartsAnew(held, last, options, dim(), impl.options.name);
  }
  impl.history = std::move(history);
  return *impl.history;
}

void CudaTable::MakeRoomForStep(Stream stream) {
  impl_->Use(stream);
  if (impl_->history == nullptr) return;
  if (impl_->history->full()) impl_->CatchUpAll();
  impl_->history->Reserve();
}

void CudaTable::AppendStep(Stream stream, const std::vector<CudaTable*>& tables,
                           float learning_rate, int64_t step) {
  std::vector<History*> histories;
  for (CudaTable* table : tables) {
    table->impl_->Use(stream);
    histories.push_back(table->impl_->history.get());
  }
  History::Append(stream, histories, learning_rate, step);
}

}  // namespace cuda
}  // namespace sok
