#include "cpp/tf/policy_outputs.h"

#include <algorithm>
#include <vector>

namespace sok {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status WriteEvictedRows(OpKernelContext* ctx, const EvictedRows& popped, int64_t dim) {
  const int64_t n = popped.keys.size(), num_slots = popped.slot_names.size();
  int64_t slot_width = 0;
  for (int64_t width : popped.slot_widths) slot_width += width;
  Tensor *keys, *rows, *slot_rows, *names, *widths, *frequencies, *last_steps;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({n}), &keys));
  TF_RETURN_IF_ERROR(ctx->allocate_output(1, TensorShape({n, dim}), &rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(2, TensorShape({n, slot_width}), &slot_rows));
  TF_RETURN_IF_ERROR(ctx->allocate_output(3, TensorShape({num_slots}), &names));
  TF_RETURN_IF_ERROR(ctx->allocate_output(4, TensorShape({num_slots}), &widths));
  TF_RETURN_IF_ERROR(ctx->allocate_output(5, TensorShape({n}), &frequencies));
  TF_RETURN_IF_ERROR(ctx->allocate_output(6, TensorShape({n}), &last_steps));
  std::copy(popped.keys.begin(), popped.keys.end(), Keys(keys));
  std::copy(popped.rows.begin(), popped.rows.end(), rows->flat<float>().data());
  std::copy(popped.slot_rows.begin(), popped.slot_rows.end(), slot_rows->flat<float>().data());
  std::copy(popped.slot_names.begin(), popped.slot_names.end(),
            names->flat<tensorflow::tstring>().data());
  std::copy(popped.slot_widths.begin(), popped.slot_widths.end(), widths->flat<int64_t>().data());
  std::copy(popped.frequencies.begin(), popped.frequencies.end(),
            frequencies->flat<int64_t>().data());
  std::copy(popped.last_steps.begin(), popped.last_steps.end(), last_steps->flat<int64_t>().data());
  return absl::OkStatus();
}

absl::Status WriteStatistics(OpKernelContext* ctx, const PolicyStatistics& s) {
  const std::vector<int64_t> values = {
      s.size,    s.seen,   s.found,    s.admitted, s.refused, s.written,           s.erased,
      s.evicted, s.popped, s.buffered, s.dropped,  s.waiting, s.dropped_gradients, s.step};
  Tensor* statistics;
  TF_RETURN_IF_ERROR(ctx->allocate_output(0, TensorShape({int64_t(values.size())}), &statistics));
  std::copy(values.begin(), values.end(), statistics->flat<int64_t>().data());
  return absl::OkStatus();
}

}  // namespace sok
