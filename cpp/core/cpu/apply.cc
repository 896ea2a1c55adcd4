#include "cpp/core/cpu/apply.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/optimizer_state.h"
#include "cpp/core/cpu/route.h"
#include "cpp/core/cpu/row_ops.h"
#include "cpp/core/cpu/scratch.h"
#include "cpp/core/rules.h"

namespace sok {
namespace {

constexpr int64_t kRowsAhead = 10;
constexpr int64_t kGrainRows = 512;

// One step on the rows of a batch.
struct Batch {
  const CpuTable& table;
  const OptimizerState& state;
  const uint32_t* row_numbers;  // [num_rows], unique
  const float* grads;           // [num_rows, dim]
  int64_t num_rows;
  int64_t dim;
  float decay;       // 1 - weight_decay * learning_rate
  float clip_value;  // infinite for none
};

template <int64_t kDim, typename Rule>
inline void UpdateRow(const Rule& rule, const float* __restrict grad, float clip_value,
                      float* __restrict row, int64_t variable_dim) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  for (int64_t d = 0; d < dim; ++d) rule.Update(Clip(grad[d], clip_value), row + d, dim);
}

template <int64_t kDim>
inline void UpdateRow(const RowWiseAdagradRule& rule, const float* __restrict grad,
                      float clip_value, float* __restrict row, int64_t variable_dim) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  // Eight partial sums: one order of summation whatever the vector width.
  float partial[8] = {};
  const int64_t whole = dim - dim % 8;
  for (int64_t d = 0; d < whole; d += 8) {
    for (int64_t j = 0; j < 8; ++j) {
      const float g = Clip(grad[d + j], clip_value);
      partial[j] += g * g;
    }
  }
  for (int64_t j = 0; j < dim - whole; ++j) {
    const float g = Clip(grad[whole + j], clip_value);
    partial[j] += g * g;
  }
  float sum = 0.0f;
  for (float p : partial) sum += p;
  const float rate = rule.Rate(sum, row, dim);
  for (int64_t d = 0; d < dim; ++d) row[d] -= rate * Clip(grad[d], clip_value);
}

template <int64_t kDim, typename Rule>
void UpdateRange(const Batch& batch, const Rule& rule, int64_t first, int64_t last) {
  const OptimizerState& state = batch.state;
  const bool owes = state.owes();
  const uint32_t previous = state.history().num_steps();
  const int64_t row_floats = state.row_floats();
  const auto prefetch = [&](int64_t i) {
    PrefetchRow<true>(batch.table.Row(batch.row_numbers[i]), row_floats);
  };
  for (int64_t i = first; i < std::min(first + kRowsAhead, last); ++i) prefetch(i);
  for (int64_t i = first; i < last; ++i) {
    if (i + kRowsAhead < last) prefetch(i + kRowsAhead);
    float* const row = batch.table.Row(batch.row_numbers[i]);
    if (owes) {
      if (state.LastStep(row) != previous) state.Apply(row);
      if (batch.decay != 1.0f) {
        for (int64_t d = 0; d < batch.dim; ++d) row[d] *= batch.decay;
      }
      state.SetLastStep(row, previous + 1);
    }
    UpdateRow<kDim>(rule, batch.grads + i * batch.dim, batch.clip_value, row, batch.dim);
  }
}

template <typename Rule>
void UpdateRows(Executor& ex, const Batch& batch, const Rule& rule) {
  WithDim(batch.dim, [&](auto constant) {
    ex.ParallelFor(batch.num_rows, kGrainRows, [&](int64_t first, int64_t last) {
      UpdateRange<decltype(constant)::value>(batch, rule, first, last);
    });
  });
}

void RunRule(Executor& ex, const Batch& batch, float learning_rate, int64_t step) {
  WithRule(batch.state.options(), learning_rate, step,
           [&](const auto& rule) { UpdateRows(ex, batch, rule); });
}

// The table's optimizer, attached if it has none yet. Needs the exclusive lock.
OptimizerState& Attach(Executor& ex, CpuTable& table, const OptimizerOptions& options) {
  if (table.catch_up() != nullptr) {
    auto* state = dynamic_cast<OptimizerState*>(table.catch_up().get());
    if (state != nullptr && state->options() == options) return *state;
    throw std::invalid_argument(
        "A table keeps the optimizer of its first step. Table '" + table.options().name + "' has " +
        (state != nullptr ? state->options().ToString() : std::string("another")) +
        ". Received: " + options.ToString());
  }
  const std::vector<SlotSpec> slots = OptimizerSlots(options, table.dim());
  for (const SlotSpec& present : table.slots()) {
    for (const SlotSpec& wanted : slots) {
      if (present.name != wanted.name || present.width == wanted.width) continue;
      throw std::invalid_argument("Slot variable '" + wanted.name + "' of " + options.ToString() +
                                  " must be " + std::to_string(wanted.width) +
                                  " floats wide. Table '" + table.options().name +
                                  "' holds one of " + std::to_string(present.width));
    }
  }
  auto state = std::make_shared<OptimizerState>(options, table.dim());
  table.ConfigureSlots(ex, slots);
  int64_t offset = table.dim();
  for (const SlotSpec& slot : slots) {
    if (table.SlotOffset(slot.name) != offset) {
      throw std::logic_error("Slot rows must lie behind the row in the order configured: '" +
                             slot.name + "' of table '" + table.options().name + "' does not");
    }
    offset += slot.width;
  }
  OptimizerState& attached = *state;
  table.AttachCatchUp(std::move(state));
  return attached;
}

// Gradients of the keys that have a row. A table with policies gives rows at lookups only: a key
// that waits, or was evicted since it was looked up, has none to update.
class PresentGradients {
 public:
  // Needs the exclusive lock. `row_numbers` [num_keys] gets those of the keys that stay.
  void Take(Executor& ex, CpuTable& table, const uint64_t* keys, const float* grads,
            int64_t num_keys, uint32_t* row_numbers) {
    table.FindRows(ex, keys, num_keys, row_numbers);
    keys_ = keys;
    grads_ = grads;
    num_keys_ = num_keys - std::count(row_numbers, row_numbers + num_keys, kNoRow);
    if (num_keys_ == num_keys) return;
    const int64_t dim = table.dim();
    std::vector<uint64_t> dropped;
    dropped.reserve(static_cast<size_t>(num_keys - num_keys_));
    kept_keys_ = Scratch<uint64_t>(num_keys_);
    kept_grads_ = Scratch<float>(num_keys_ * dim);
    int64_t kept = 0;
    for (int64_t i = 0; i < num_keys; ++i) {
      if (row_numbers[i] == kNoRow) {
        dropped.push_back(keys[i]);
        continue;
      }
      row_numbers[kept] = row_numbers[i];
      kept_keys_[kept] = keys[i];
      std::copy_n(grads + i * dim, dim, kept_grads_.get() + kept * dim);
      ++kept;
    }
    keys_ = kept_keys_.get();
    grads_ = kept_grads_.get();
    std::sort(dropped.begin(), dropped.end());
    table.CountDroppedGradients(std::unique(dropped.begin(), dropped.end()) - dropped.begin());
  }

  const uint64_t* keys() const { return keys_; }
  const float* grads() const { return grads_; }
  int64_t num_keys() const { return num_keys_; }

 private:
  const uint64_t* keys_ = nullptr;
  const float* grads_ = nullptr;
  int64_t num_keys_ = 0;
  Scratch<uint64_t> kept_keys_;
  Scratch<float> kept_grads_;
};

}  // namespace

int64_t MergeGradients(Executor& ex, const uint64_t* keys, const float* grads, int64_t num_keys,
                       int64_t dim, uint64_t* unique_keys, float* unique_grads) {
  const Scratch<int32_t> inverse(std::max<int64_t>(num_keys, 0));
  const Route route(ex, keys, num_keys, 1, inverse.get());
  route.WriteUnique(ex, unique_keys);
  Samples samples;
  samples.inverse = inverse.get();
  samples.num_keys = num_keys;
  samples.combiner = Combiner::kNone;
  CombineGradient(ex, samples, grads, route.num_unique(), dim, unique_grads);
  return route.num_unique();
}

void ApplyGradients(Executor& ex, CpuTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys, const float* grads,
                    int64_t num_keys, bool keys_are_unique) {
  CheckStep(options, learning_rate, step);
  const std::unique_lock<std::shared_mutex> lock(table.mutex());
  OptimizerState& state = Attach(ex, table, options);
  const int64_t dim = table.dim();

  Scratch<uint32_t> row_numbers(num_keys);
  PresentGradients present;
  if (table.keeps_records()) {
    present.Take(ex, table, keys, grads, num_keys, row_numbers.get());
    keys = present.keys();
    grads = present.grads();
    num_keys = present.num_keys();
  } else {
    table.FindOrInsertRows(ex, keys, num_keys, row_numbers.get(), nullptr);
  }
  Scratch<float> merged_grads;
  if (!keys_are_unique && state.HasDuplicates(row_numbers.get(), num_keys)) {
    const Scratch<uint64_t> merged_keys(num_keys);
    merged_grads = Scratch<float>(num_keys * dim);
    num_keys =
        MergeGradients(ex, keys, grads, num_keys, dim, merged_keys.get(), merged_grads.get());
    grads = merged_grads.get();
    table.FindRows(ex, merged_keys.get(), num_keys, row_numbers.get());
  }

  const float no_clip = std::numeric_limits<float>::infinity();
  const Batch batch{table,
                    state,
                    row_numbers.get(),
                    grads,
                    num_keys,
                    dim,
                    static_cast<float>(1.0 - AsWritten(options.weight_decay) * learning_rate),
                    options.clip_value > 0.0f ? options.clip_value : no_clip};
  // Rows that say they are one step ahead of the history must not come to be.
  if (state.owes()) state.history().Reserve();
  RunRule(ex, batch, learning_rate, step);
  if (state.owes()) state.history().Append(learning_rate, step);
}

}  // namespace sok
