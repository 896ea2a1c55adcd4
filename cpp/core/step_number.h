// StepNumber: which step of its own a table makes, where its optimizer counts another.
//
// Adam's correction of moments that start at zero goes by the number of the step. Moments that come
// from a dump have their steps behind them, so the table goes on counting from the dump, whatever
// the optimizer that it is then trained by has counted.
#ifndef SOK_CORE_STEP_NUMBER_H_
#define SOK_CORE_STEP_NUMBER_H_

#include <cstdint>

namespace sok {

class StepNumber {
 public:
  int64_t last() const { return last_; }  // -1: not known

  // The table's number of the optimizer's step `given`, which counts from 1.
  int64_t Of(int64_t given) const {
    if (resumes_) return last_ + 1;
    // An optimizer that begins anew on the same table does so for the table too.
    return given + shift_ < 1 ? given : given + shift_;
  }
  void Made(int64_t given) noexcept {
    last_ = Of(given);
    shift_ = last_ - given;
    resumes_ = false;
  }
  // The next step follows on `last`; -1: it is the one that the optimizer says.
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
