#include "cpp/tf/row_layout.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace sok {
namespace {

using Counts = std::vector<std::vector<int64_t>>;

Counts CountsOf(const Tensor& counts, size_t num_tables) {
  Counts of_ranks;
  for (int64_t r = 0; r < counts.dim_size(0); ++r) {
    const int64_t* const first = &counts.matrix<int64_t>()(r, 0);
    of_ranks.emplace_back(first, first + num_tables);
  }
  return of_ranks;
}

Counts CountsOf(const Segments& segments) {
  Counts of_ranks;
  for (const std::vector<KeySegment>& of_rank : segments) {
    of_ranks.emplace_back();
    for (const KeySegment& segment : of_rank) of_ranks.back().push_back(segment.num_keys);
  }
  return of_ranks;
}

}  // namespace

RowLayout::RowLayout(const Tensor& counts, const std::vector<int64_t>& dims)
    : RowLayout(CountsOf(counts, dims.size()), dims) {}

RowLayout::RowLayout(const Segments& segments, const std::vector<int64_t>& dims)
    : RowLayout(CountsOf(segments), dims) {}

RowLayout::RowLayout(Counts counts, const std::vector<int64_t>& dims)
    : dims_(dims), counts_(std::move(counts)) {
  for (const std::vector<int64_t>& of_rank : counts_) {
    const int64_t begin = num_words_;
    num_words_ += kHeadWords<float>;
    starts_.emplace_back();
    for (size_t i = 0; i < dims_.size(); ++i) {
      starts_.back().push_back(num_words_);
      num_words_ += of_rank[i] * dims_[i];
    }
    words_.push_back(num_words_ - begin);
  }
}

int64_t RowLayout::num_rows(int i) const {
  int64_t num_rows = 0;
  for (const std::vector<int64_t>& of_rank : counts_) num_rows += of_rank[i];
  return num_rows;
}

int64_t RowLayout::num_rows() const {
  int64_t num_rows = 0;
  for (int i = 0; i < num_tables(); ++i) num_rows += this->num_rows(i);
  return num_rows;
}

bool RowLayout::IsAligned(int i) const {
  return dims_[i] % 4 == 0 && std::all_of(starts_.begin(), starts_.end(),
                                          [i](const auto& starts) { return starts[i] % 4 == 0; });
}

absl::Status RowLayout::Check(const Tensor& message) const {
  if (num_words_ == message.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the row message must hold ", num_words_,
                   " words, one row per key sent. Received: ", message.NumElements()));
}

absl::Status RowLayout::CheckGradients(const Tensor& splits) const {
  for (int64_t r = 0; r < world_size(); ++r) {
    const int64_t received = splits.flat<int32_t>()(r);
    if (words_[r] == received) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the gradients of rank ", r, " must hold ", words_[r],
                     " words, one row per key it asked for. Received: ", received));
  }
  return absl::OkStatus();
}

}  // namespace sok
