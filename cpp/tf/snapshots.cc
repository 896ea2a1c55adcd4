#include "cpp/tf/snapshots.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace sok {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

namespace {

absl::Status WritePolicy(OpKernelContext* ctx, const RecordSnapshot& policy) {
  const int64_t num_records = policy.records.size() / 3, num_waiting = policy.waiting.size();
  const int64_t num_counters = policy.counters.size();
  Tensor *records, *waiting, *counters, *step;
  TF_RETURN_IF_ERROR(ctx->allocate_output(5, TensorShape({num_records, 3}), &records));
  TF_RETURN_IF_ERROR(ctx->allocate_output(6, TensorShape({num_waiting, 3}), &waiting));
  TF_RETURN_IF_ERROR(ctx->allocate_output(7, TensorShape({num_counters}), &counters));
  TF_RETURN_IF_ERROR(ctx->allocate_output(8, TensorShape({}), &step));
  std::copy(policy.records.begin(), policy.records.end(), records->flat<int64_t>().data());
  int64_t* out = waiting->flat<int64_t>().data();
  for (const WaitingKey& key : policy.waiting) {
    *out++ = static_cast<int64_t>(key.key);
    *out++ = key.count;
    *out++ = key.last_step;
  }
  std::copy(policy.counters.begin(), policy.counters.end(), counters->flat<int64_t>().data());
  step->scalar<int64_t>()() = policy.step;
  return absl::OkStatus();
}

absl::Status ReadPolicy(OpKernelContext* ctx, RecordSnapshot* policy) {
  const Tensor &records = ctx->input(6), &waiting = ctx->input(7), &counters = ctx->input(8);
  if (waiting.NumElements() % 3 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "waiting must have shape [num_waiting, 3]. Received: ", waiting.shape().DebugString()));
  }
  const auto values = [](const Tensor& tensor) { return tensor.flat<int64_t>().data(); };
  if (!tensorflow::TensorShapeUtils::IsScalar(ctx->input(9).shape())) {
    return absl::InvalidArgumentError(absl::StrCat("step must be a scalar. Received: shape ",
                                                   ctx->input(9).shape().DebugString()));
  }
  policy->records.assign(values(records), values(records) + records.NumElements());
  policy->counters.assign(values(counters), values(counters) + counters.NumElements());
  for (int64_t i = 0; i < waiting.NumElements(); i += 3) {
    const int64_t* const key = values(waiting) + i;
    policy->waiting.push_back({static_cast<uint64_t>(key[0]), key[1], key[2]});
  }
  policy->step = ctx->input(9).scalar<int64_t>()();
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSnapshot(OpKernelContext* ctx, const TableSnapshot& snapshot, int64_t dim) {
  const int64_t n = snapshot.keys.size();
  int64_t slot_width = 0;
  for (int64_t width : snapshot.slot_widths) slot_width += width;
  const int64_t num_slots = snapshot.slot_names.size();
  Tensor *keys, *rows, *slot_rows, *names, *widths;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &keys));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n, dim}), &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({n, slot_width}), &slot_rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({num_slots}), &names));
  TF_RETURN_IF_ERROR(ctx->allocate_output(4, TensorShape({num_slots}), &widths));
  std::copy(snapshot.keys.begin(), snapshot.keys.end(), Keys(keys));
  std::copy(snapshot.rows.begin(), snapshot.rows.end(), rows->flat<float>().data());
  std::copy(snapshot.slot_rows.begin(), snapshot.slot_rows.end(), slot_rows->flat<float>().data());
  for (int64_t i = 0; i < num_slots; ++i) {
    names->flat<tensorflow::tstring>()(i) = snapshot.slot_names[i];
    widths->flat<int64_t>()(i) = snapshot.slot_widths[i];
  }
  return WritePolicy(ctx, snapshot.policy);
}

absl::Status ReadSnapshot(OpKernelContext* ctx, const TableOptions& options, bool replace,
                          TableSnapshot* snapshot) {
  const Tensor &keys = ctx->input(1), &rows = ctx->input(2), &slot_rows = ctx->input(3);
  const Tensor &names = ctx->input(4), &widths = ctx->input(5);
  const int64_t n = keys.NumElements();
  if (names.NumElements() != widths.NumElements()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "slot_names and slot_widths must be of one length. Received: ", names.NumElements(),
        " and ", widths.NumElements()));
  }
  if (replace && options.max_capacity > 0 && n > options.max_capacity) {
    return absl::ResourceExhaustedError(
        absl::StrCat("table '", options.name, "' holds at most ", options.max_capacity,
                     " keys on this rank. Received: ", n, " keys to replace its content with"));
  }
  int64_t slot_width = 0;
  for (int64_t i = 0; i < names.NumElements(); ++i) {
    snapshot->slot_names.push_back(names.flat<tensorflow::tstring>()(i));
    snapshot->slot_widths.push_back(widths.flat<int64_t>()(i));
    slot_width += snapshot->slot_widths.back();
  }
  if (rows.NumElements() != n * options.dim || slot_rows.NumElements() != n * slot_width) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows must hold ", n, " x ", options.dim, " and slot_rows ", n, " x ",
                     slot_width, " floats. Received: ", rows.shape().DebugString(), " and ",
                     slot_rows.shape().DebugString(), " (table '", options.name, "')"));
  }
  const auto floats = [](const Tensor& tensor) { return tensor.flat<float>().data(); };
  snapshot->keys.assign(Keys(keys), Keys(keys) + n);
  snapshot->rows.assign(floats(rows), floats(rows) + rows.NumElements());
  snapshot->slot_rows.assign(floats(slot_rows), floats(slot_rows) + slot_rows.NumElements());
  return ReadPolicy(ctx, &snapshot->policy);
}

}  // namespace sok
