// SizeBound: an upper bound of a count that only the device knows, without waiting for the device.
//
// A batch of n keys adds at most n. After a batch the real count is copied to pinned host memory.
// Once that copy has arrived, the bound is the copied count plus the batches that followed:
//
//     batches     b1 b2 [copy] b3 b4 ...                  bound = copied count + n3 + n4
//                         known       since the copy
//
// Invariant: count <= bound() after all batches so far. At most one copy is under way.
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

  // A batch that adds at most `num_keys` was launched.
  void Add(int64_t num_keys) {
    since_known_ += num_keys;
    if (copying_) since_copy_ += num_keys;
  }
  // `count` keys were erased, and no copy is under way.
  void Remove(int64_t count) { known_ -= count; }
  // A copy of the count was started after all batches so far.
  void CopyStarted() {
    copying_ = true;
    since_copy_ = 0;
  }
  void CopyArrived(int64_t count) {
    known_ = count;
    since_known_ = since_copy_;
    copying_ = false;
  }
  // The caller knows the count, for example after Clear. A copy under way is stale.
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
