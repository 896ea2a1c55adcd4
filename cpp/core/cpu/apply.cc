#include "cpp/core/cpu/apply.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <vector>

#include "cpp/core/cpu/change_log.h"
#include "cpp/core/cpu/combine.h"
#include "cpp/core/cpu/group.h"
#include "cpp/core/cpu/narrow_update.h"
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
  const uint64_t* keys;         // [num_rows]
  const float* grads;           // [num_rows, dim]
  int64_t num_rows;
  int64_t dim;
  int64_t step;
  float decay;       // 1 - weight_decay * learning_rate
  float clip_value;  // infinite for none
};

template <int64_t kDim, typename Rule>
inline void UpdateRow(const Rule& rule, const float* __restrict grad, float clip_value,
                      float* __restrict row, int64_t variable_dim) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) rule.Update(Clip(grad[d], clip_value), row + d, dim);
}

// Eight partial sums: the order of summation does not depend on the vector width.
template <int64_t kDim>
inline float SumOfSquares(const float* __restrict grad, float clip_value, int64_t variable_dim) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  float partial[8] = {};
  const int64_t whole = dim - dim % 8;
  for (int64_t d = 0; d < whole; d += 8) {
#pragma omp simd
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
  return sum;
}

template <int64_t kDim>
inline void UpdateRow(const RowWiseAdagradRule& rule, const float* __restrict grad,
                      float clip_value, float* __restrict row, int64_t variable_dim) {
  const int64_t dim = kDim > 0 ? kDim : variable_dim;
  const float rate = rule.Rate(SumOfSquares<kDim>(grad, clip_value, dim), row + dim, dim);
#pragma omp simd
  for (int64_t d = 0; d < dim; ++d) row[d] -= rate * Clip(grad[d], clip_value);
}

void UpdateNarrowRow(const RowWiseAdagradRule& rule, const float* grad, float clip_value,
                     const NarrowRow& to) {
  const float rate = rule.Rate(SumOfSquares<0>(grad, clip_value, to.dim), to.slots(), to.dim);
  UpdateNarrowRow(SgdRule{rate}, grad, clip_value, to);
}

template <int64_t kDim, typename Rule>
void UpdateRange(const Batch& batch, const Rule& rule, int64_t first, int64_t last) {
  const OptimizerState& state = batch.state;
  const RowFormat& format = batch.table.format();
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
    if (format.is_narrow()) {
      UpdateNarrowRow(rule, batch.grads + i * batch.dim, batch.clip_value,
                      NarrowRow{format, row, batch.keys[i], batch.step, batch.dim});
      continue;
    }
    if (owes) {
      if (state.LastStep(row) != previous) state.Apply(row);
      if (batch.decay != 1.0f) {
#pragma omp simd
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

// The table's optimizer if it is this one; null if the table has none yet and can take this one;
// throws otherwise. Needs a lock.
OptimizerState* Attached(const CpuTable& table, const OptimizerOptions& options) {
  if (RowCatchUp* const catch_up = table.catch_up().get()) {
    // Not dynamic_cast: the class has no subclasses, and this runs for every table at every step.
    const bool is_state = typeid(*catch_up) == typeid(OptimizerState);
    auto* const state = is_state ? static_cast<OptimizerState*>(catch_up) : nullptr;
    if (state != nullptr && state->options() == options) return state;
    throw std::invalid_argument(
        "A table keeps the optimizer of its first step. Table '" + table.options().name + "' has " +
        (state != nullptr ? state->options().ToString() : std::string("another")) +
        ". Received: " + options.ToString());
  }
  if (table.format().is_narrow() && ReplayKindOf(options) != ReplayKind::kNothing) {
    // Such a row would be rounded each time it is brought up to date, so rows would depend on when
    // they were saved.
    throw std::invalid_argument("A table of dtype " +
                                std::string(RowTypeName(table.options().row_type)) +
                                " needs an optimizer that changes the rows of the batch only, as "
                                "SGD, Adagrad and, with `lazy=True`, Adam and momentum do without "
                                "weight decay. Received: " +
                                options.ToString() + " (table '" + table.options().name + "')");
  }
  return nullptr;
}

// Attaches the optimizer to a table that can take it. Needs the exclusive lock.
OptimizerState* Attach(Executor& ex, CpuTable& table, const OptimizerOptions& options) {
  const std::vector<SlotVariableSpec> slots = OptimizerSlots(options, table.dim());
  auto state = std::make_shared<OptimizerState>(options, table.dim());
  const int64_t last = table.step_number().last();
  const bool starts_anew = IsOfAnotherRule(table.slots(), last, slots);
  const std::vector<SlotVariableSpec> held = table.slots();
  table.LayOutSlots(ex, slots, !starts_anew);
  if (starts_anew) {
    table.step_number().ResumeFrom(0);
    SayThatStateStartsAnew(held, last, options, table.dim(), table.options().name);
  }
  int64_t offset = table.format().embedding_floats();
  for (const SlotVariableSpec& slot : slots) {
    if (table.SlotOffset(slot.name) != offset) {
      throw std::logic_error("Slot rows must lie behind the row in the order configured: '" +
                             slot.name + "' of table '" + table.options().name + "' does not");
    }
    offset += slot.width;
  }
  OptimizerState* const attached = state.get();
  table.AttachCatchUp(std::move(state));
  return attached;
}

// Gradients of the keys that have a row. In a table with policies only lookups give rows: a key
// that waits, or was evicted since it was looked up, has no row to update.
class PresentGradients {
 public:
  // Needs the exclusive lock. `row_numbers` [num_keys] gets those of the keys that have a row.
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
    num_dropped_ = std::unique(dropped.begin(), dropped.end()) - dropped.begin();
  }

  const uint64_t* keys() const { return keys_; }
  const float* grads() const { return grads_; }
  int64_t num_keys() const { return num_keys_; }
  int64_t num_dropped() const { return num_dropped_; }

 private:
  const uint64_t* keys_ = nullptr;
  const float* grads_ = nullptr;
  int64_t num_keys_ = 0;
  int64_t num_dropped_ = 0;
  Scratch<uint64_t> kept_keys_;
  Scratch<float> kept_grads_;
};

// One table's part in a step. Needs the exclusive lock while it lives.
class TableStep {
 public:
  // Throws if the table has another optimizer or cannot take this one. Changes nothing.
  void Begin(const TableGradients& batch, const OptimizerOptions& options) {
    batch_ = &batch;
    state_ = Attached(*batch.table, options);
  }

  // Whether the table may be full.
  bool may_be_full() const {
    const TableOptions& options = batch_->table->options();
    const int64_t most = options.max_capacity > 0 ? options.max_capacity : int64_t{kNoRow};
    return !options.use_hashtable || batch_->table->size() + batch_->num_keys > most;
  }

  // Finds the rows and does all that can fail; updates nothing.
  void Prepare(Executor& ex, const OptimizerOptions& options, bool keys_are_unique) {
    CpuTable& table = *batch_->table;
    if (state_ == nullptr) state_ = Attach(ex, table, options);
    const int64_t dim = table.dim();
    const uint64_t* keys = batch_->keys;
    grads_ = batch_->grads;
    num_rows_ = batch_->num_keys;
    if (!table.keeps_records()) row_numbers_ = table.RecallRows(ex, keys, num_rows_);
    const bool recalled = static_cast<bool>(row_numbers_);
    if (!recalled) row_numbers_ = Scratch<uint32_t>(num_rows_);
    if (table.keeps_records()) {
      present_.Take(ex, table, keys, grads_, num_rows_, row_numbers_.get());
      keys = present_.keys();
      grads_ = present_.grads();
      num_rows_ = present_.num_keys();
    } else if (recalled) {
      keys_are_unique = true;
    } else {
      table.FindOrInsertRows(ex, keys, num_rows_, row_numbers_.get(), keys_are_unique);
    }
    if (!keys_are_unique && state_->HasDuplicates(row_numbers_.get(), num_rows_)) {
      merged_keys_ = Scratch<uint64_t>(num_rows_);
      merged_grads_ = Scratch<float>(num_rows_ * dim);
      num_rows_ =
          MergeGradients(ex, keys, grads_, num_rows_, dim, merged_keys_.get(), merged_grads_.get());
      grads_ = merged_grads_.get();
      keys = merged_keys_.get();
      table.FindRows(ex, keys, num_rows_, row_numbers_.get());
    }
    keys_ = keys;
    table.BringRows(ex, row_numbers_.get(), num_rows_, /*writes=*/true);
    if (state_->owes() && state_->history().IsLong(table.row_bytes())) table.CatchUpRows(ex);
    // Append must not fail after rows were marked with a step that it has not appended.
    if (state_->owes()) state_->history().Reserve();
  }

  // The table's own number for the optimizer's step.
  int64_t NumberOf(int64_t step) const { return batch_->table->step_number().Of(step); }

  template <typename Rule>
  void Run(Executor& ex, const Rule& rule, float decay, float learning_rate, int64_t step) {
    CpuTable& table = *batch_->table;
    const int64_t number = NumberOf(step);
    const float clip_value = state_->options().clip_value;
    const float no_clip = std::numeric_limits<float>::infinity();
    const Batch batch{table,
                      *state_,
                      row_numbers_.get(),
                      keys_,
                      grads_,
                      num_rows_,
                      table.dim(),
                      number,
                      decay,
                      clip_value > 0.0f ? clip_value : no_clip};
    table.Touch(ex, keys_, row_numbers_.get(), num_rows_);
    UpdateRows(ex, batch, rule);
    if (state_->owes()) {
      state_->history().Append(learning_rate, number);
      if (table.changes() != nullptr) table.changes()->Step(learning_rate, number);
    }
    table.step_number().Made(step);
    if (table.keeps_records()) table.CountDroppedGradients(present_.num_dropped());
  }

 private:
  const TableGradients* batch_ = nullptr;
  OptimizerState* state_ = nullptr;
  Scratch<uint32_t> row_numbers_;   // [num_rows_], each once
  const uint64_t* keys_ = nullptr;  // [num_rows_]: like grads_ the caller's or one of those below
  const float* grads_ = nullptr;    // [num_rows_, dim]
  int64_t num_rows_ = 0;
  PresentGradients present_;
  Scratch<uint64_t> merged_keys_;
  Scratch<float> merged_grads_;
};

}  // namespace

int64_t MergeGradients(Executor& ex, const uint64_t* keys, const float* grads, int64_t num_keys,
                       int64_t dim, uint64_t* unique_keys, float* unique_grads) {
  const Scratch<int32_t> inverse(std::max<int64_t>(num_keys, 0));
  const int64_t num_unique = UniqueKeys(ex, keys, num_keys, unique_keys, inverse.get());
  Samples samples;
  samples.inverse = inverse.get();
  samples.num_keys = num_keys;
  samples.combiner = Combiner::kNone;
  CombineGradient(ex, samples, grads, num_unique, dim, unique_grads);
  return num_unique;
}

void ApplyGradients(Executor& ex, const std::vector<TableGradients>& batches,
                    const OptimizerOptions& options, float learning_rate, int64_t step,
                    bool keys_are_unique) {
  CheckStep(options, learning_rate, step);
  std::vector<CpuTable*> tables;
  std::vector<int64_t> num_keys;
  for (const TableGradients& batch : batches) {
    tables.push_back(batch.table);
    num_keys.push_back(batch.num_keys);
  }
  const TableGroup group(tables);
  if (const CpuTable* const twice = group.repeated()) {
    throw std::invalid_argument("Each table may occur only once in a step. Received: table '" +
                                twice->options().name + "' twice");
  }
  const TableGroup::Lock lock(group, /*exclusive=*/true);
  std::vector<TableStep> steps(batches.size());
  for (size_t i = 0; i < batches.size(); ++i) steps[i].Begin(batches[i], options);
  // Everything that can fail, in all tables, before the first row is updated. Tables that may be
  // full come first: if one of them is, the others have not even inserted their new keys.
  std::vector<int64_t> full, others;
  for (size_t i = 0; i < steps.size(); ++i) {
    (steps[i].may_be_full() ? full : others).push_back(static_cast<int64_t>(i));
  }
  for (const std::vector<int64_t>& places : {full, others}) {
    std::vector<int64_t> of_these;
    for (int64_t i : places) of_these.push_back(num_keys[i]);
    ForEachOf(ex, of_these, [&](Executor& inner, int64_t k) {
      steps[places[k]].Prepare(inner, options, keys_are_unique);
    });
  }
  const float decay = static_cast<float>(1.0 - AsWritten(options.weight_decay) * learning_rate);
  // Usually one number for all. Restored tables continue counting from their dumps.
  struct Alike {
    std::vector<int64_t> places, num_keys;
  };
  std::map<int64_t, Alike> by_number;
  for (size_t i = 0; i < steps.size(); ++i) {
    Alike& alike = by_number[steps[i].NumberOf(step)];
    alike.places.push_back(static_cast<int64_t>(i));
    alike.num_keys.push_back(num_keys[i]);
  }
  for (const auto& [number, alike] : by_number) {
    const std::vector<int64_t>& places = alike.places;
    WithRule(options, learning_rate, number, [&](const auto& rule) {
      ForEachOf(ex, alike.num_keys, [&](Executor& inner, int64_t k) {
        steps[places[k]].Run(inner, rule, decay, learning_rate, step);
      });
    });
  }
}

void ApplyGradients(Executor& ex, CpuTable& table, const OptimizerOptions& options,
                    float learning_rate, int64_t step, const uint64_t* keys, const float* grads,
                    int64_t num_keys, bool keys_are_unique) {
  ApplyGradients(ex, {{&table, keys, grads, num_keys}}, options, learning_rate, step,
                 keys_are_unique);
}

}  // namespace sok
