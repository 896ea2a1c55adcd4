// StepNumber: a table's own step number, which may differ from that of its optimizer.
//
// Adam's bias correction depends on the step number, because its moments start at zero. Moments
// from a dump already contain steps. The table therefore continues counting from the dump, whatever
// its present optimizer has counted.
#ifndef SOK_CORE_STEP_NUMBER_H_
#define SOK_CORE_STEP_NUMBER_H_

#include <cstdint>

namespace sok {

class StepNumber {
 public:
  int64_t last() const { return last_; }  // -1: not known

  // The table's number for the optimizer's step `given`, which counts from 1.
  int64_t Of(int64_t given) const {
    if (resumes_) return last_ + 1;
    // Below 1 if a new optimizer counts from 1 again: the table then starts again too.
    return given + shift_ < 1 ? given : given + shift_;
  }
  void Made(int64_t given) noexcept {
    last_ = Of(given);
    shift_ = last_ - given;
    resumes_ = false;
  }
  // The next step is last + 1; if `last` is -1, it is the optimizer's number.
  void ResumeFrom(int64_t last) noexcept {
    last_ = last < 0 ? -1 : last;
    shift_ = 0;
    resumes_ = last >= 0;
  }

 private:
  int64_t last_ = -1;
  int64_t shift_ = 0;  // what is added to the optimizer's count
  bool resumes_ = false;
};

}  // namespace sok

#endif  // SOK_CORE_STEP_NUMBER_H_
