#include "cpp/tf/row_layout.h"

#include "absl/strings/str_cat.h"
#include "cpp/core/cpu/message.h"

namespace sok {

RowLayout::RowLayout(const Tensor& counts, const FeatureAttrs& features) {
  auto count = counts.matrix<int64_t>();
  for (int64_t r = 0; r < counts.dim_size(0); ++r) {
    num_words_ += kHeadWords<float>;
    starts_.emplace_back();
    counts_.emplace_back();
    for (int i = 0; i < features.size(); ++i) {
      starts_[r].push_back(num_words_);
      counts_[r].push_back(count(r, i));
      num_words_ += count(r, i) * features.dim(i);
    }
  }
}

int64_t RowLayout::num_unique(int i) const {
  int64_t num_unique = 0;
  for (const std::vector<int64_t>& of_rank : counts_) num_unique += of_rank[i];
  return num_unique;
}

absl::Status RowLayout::Check(const Tensor& message) const {
  if (num_words_ == message.NumElements()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the row message must hold ", num_words_,
                   " words, one row per key sent. Received: ", message.NumElements()));
}

}  // namespace sok
