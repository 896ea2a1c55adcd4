// Where rows are in a row message (cpu/message.h), from the number of keys sent to each rank.
//
//     counts  [world_size, num_tables]: unique keys of table i sent to rank r
//     message [head | rows of table 0 | rows of table 1 ..] [head | ..]      one block per rank
#ifndef SOK_TF_ROW_LAYOUT_H_
#define SOK_TF_ROW_LAYOUT_H_

#include <vector>

#include "cpp/tf/messages.h"

namespace sok {

class RowLayout {
 public:
  // Of the message that a rank receives; `counts` is the output of its SokRoute.
  RowLayout(const Tensor& counts, const std::vector<int64_t>& dims);
  // Of the message that an owner sends, from the keys that all ranks asked it for.
  RowLayout(const Segments& segments, const std::vector<int64_t>& dims);

  int64_t world_size() const { return static_cast<int64_t>(counts_.size()); }
  int num_tables() const { return static_cast<int>(dims_.size()); }
  int64_t dim(int i) const { return dims_[i]; }
  int64_t num_words() const { return num_words_; }                           // of the whole message
  const std::vector<int64_t>& words() const { return words_; }               // of each rank's block
  int64_t head(int64_t r) const { return start(r, 0) - kHeadWords<float>; }  // where a block begins
  int64_t start(int64_t r, int i) const { return starts_[r][i]; }  // of table i's rows from rank r
  int64_t count(int64_t r, int i) const { return counts_[r][i]; }  // how many rows there are
  int64_t num_rows(int i) const;                                   // of all ranks
  int64_t num_rows() const;                                        // of all tables, too
  bool IsAligned(int i) const;  // whether all rows of table i begin at a multiple of 16 bytes
  // Checks that the message has num_words() words.
  absl::Status Check(const Tensor& message) const;
  // Checks that gradients with these splits are one row per key.
  absl::Status CheckGradients(const Tensor& splits) const;

 private:
  using Counts = std::vector<std::vector<int64_t>>;  // [world_size][num_tables]
  RowLayout(Counts counts, const std::vector<int64_t>& dims);

  const std::vector<int64_t> dims_;
  const Counts counts_;
  Counts starts_;
  std::vector<int64_t> words_;
  int64_t num_words_ = 0;
};

}  // namespace sok

#endif  // SOK_TF_ROW_LAYOUT_H_
