// Where rows are in a row message (cpu/message.h), from the number of keys sent to each rank.
//
//     counts  [world_size, num_tables]: unique keys of table i sent to rank r
//     message [head | rows of table 0 | rows of table 1 ..] [head | ..]      one block per rank
#ifndef SOK_TF_ROW_LAYOUT_H_
#define SOK_TF_ROW_LAYOUT_H_

#include <vector>

#include "cpp/tf/samples.h"

namespace sok {

class RowLayout {
 public:
  RowLayout(const Tensor& counts, const FeatureAttrs& features);

  int64_t world_size() const { return static_cast<int64_t>(starts_.size()); }
  int64_t num_words() const { return num_words_; }  // of the whole message
  // The first word of table i's rows from rank r, and how many rows there are.
  int64_t start(int64_t r, int i) const { return starts_[r][i]; }
  int64_t count(int64_t r, int i) const { return counts_[r][i]; }
  int64_t num_unique(int i) const;  // of all ranks
  // Checks that the message has num_words() words.
  absl::Status Check(const Tensor& message) const;

 private:
  std::vector<std::vector<int64_t>> starts_, counts_;  // [world_size][num_tables]
  int64_t num_words_ = 0;
};

}  // namespace sok

#endif  // SOK_TF_ROW_LAYOUT_H_
