// SizeBound: an upper bound of a count that only the device knows, without waiting for the device.
//
// A batch of n keys adds at most n. How many it did add is copied to pinned host memory behind it;
// once that copy has arrived, the bound is what it says plus the batches that followed:
//
//     batches     b1 b2 [copy] b3 b4 ...                  bound = copied count + n3 + n4
//                         known       since the copy
//
// Invariant: count <= bound() for every batch handed over so far. One copy is under way at a time.
//
// Pure bookkeeping: the table makes the copies and tells when they have arrived.
#ifndef SOK_CORE_CUDA_INDEX_SIZE_BOUND_H_
#define SOK_CORE_CUDA_INDEX_SIZE_BOUND_H_

#include <cstdint>

namespace sok {
namespace cuda {

class SizeBound {
 public:
  int64_t bound() const { return known_ + since_known_; }
  int64_t known() const { return known_; }
  bool exact() const { return since_known_ == 0; }
  bool copy_under_way() const { return copying_; }

  // A batch that adds at most `num_keys` was handed to the device.
  void Add(int64_t num_keys) {
    since_known_ += num_keys;
    if (copying_) since_copy_ += num_keys;
  }
  // The count was asked for behind all batches so far.
  void CopyStarted() {
    copying_ = true;
    since_copy_ = 0;
  }
  void CopyArrived(int64_t count) {
    known_ = count;
    since_known_ = since_copy_;
    copying_ = false;
  }
  // The caller knows the count by itself, as after Clear. A copy under way is stale.
  void Set(int64_t count) {
    known_ = count;
    since_known_ = 0;
    since_copy_ = 0;
  }

 private:
  int64_t known_ = 0;
  int64_t since_known_ = 0;
  int64_t since_copy_ = 0;
  bool copying_ = false;
};

}  // namespace cuda
}  // namespace sok

#endif  // SOK_CORE_CUDA_INDEX_SIZE_BOUND_H_
