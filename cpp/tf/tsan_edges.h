// Tells the thread sanitizer where TensorFlow hands work from one thread to another.
//
// TensorFlow is not instrumented, so the sanitizer does not see how an op's outputs reach the next
// op. To it, each tensor that one thread fills and another reads is a race. Here the end of every
// op of this library happens before the beginning of every op that begins later:
//
//     op on thread 1:  begin ----- end (release)
//     op on thread 2:                     begin (acquire) ----- end        ordered: no report
//     op on thread 3:       begin ----- end                                at once with 1: reported
//
// Ops that run at the same time stay unordered, so a table that is used without its lock is found.
// Only a build with the thread sanitizer includes this file, before each source (CMakeLists.txt). So
// no kernel is `final`.
#ifndef SOK_TF_TSAN_EDGES_H_
#define SOK_TF_TSAN_EDGES_H_

#include "tensorflow/core/framework/op_kernel.h"

extern "C" void __tsan_acquire(void* address);
extern "C" void __tsan_release(void* address);

namespace sok {

inline char tsan_edge;

// `Kernel` with each construction and each call between the two edges.
template <typename Kernel>
class BetweenEdges final : public Kernel {
 public:
  explicit BetweenEdges(tensorflow::OpKernelConstruction* ctx) : Kernel(ctx) {
    __tsan_release(&tsan_edge);
  }
  void Compute(tensorflow::OpKernelContext* ctx) override {
    __tsan_acquire(&tsan_edge);
    Kernel::Compute(ctx);
    __tsan_release(&tsan_edge);
  }
};

}  // namespace sok

#undef REGISTER_KERNEL_BUILDER
#define REGISTER_KERNEL_BUILDER(kernel_builder, ...) \
  REGISTER_KERNEL_BUILDER_IMPL(kernel_builder, false, ::sok::BetweenEdges<__VA_ARGS__>)

#endif  // SOK_TF_TSAN_EDGES_H_
