// What this process waits for from other ranks, so that an endless wait can be reported and ended.
//
//     SokBeginWait -> collective -> SokEndWait
//           \-> SokWatch             ends with the wait, or fails when waits are stopped
//
// This library cannot end the collective itself. SokWatch runs beside it and fails first, so that
// the step's error is the reason given, not the error of the transport, which is shut down next.
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "cpp/tf/common.h"
#include "tensorflow/core/framework/cancellation.h"

namespace sok {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::shape_inference::NoOutputs;

namespace {

using Clock = std::chrono::steady_clock;
using Finish = std::function<void(absl::Status)>;

struct Wait {
  std::string what;
  Clock::time_point start = Clock::now();
  Finish watcher;  // empty if there is none
};

class Waits {
 public:
  static Waits& Get() {
    static auto* const waits = new Waits;
    return *waits;
  }

  absl::Status Begin(const std::string& what, int64_t* id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!stopped_.empty()) return absl::DeadlineExceededError(stopped_);
    if (!refused_.empty()) {
      return absl::DeadlineExceededError("the exchange '" + what + "': " + refused_);
    }
    *id = ++last_;
    waits_[*id].what = what;
    return absl::OkStatus();
  }

  // Calls `watcher` at the end of the wait, at once if it has ended.
  void Watch(int64_t id, Finish watcher) {
    absl::Status status;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_ids_.count(id) > 0) status = absl::DeadlineExceededError(stopped_);
      const auto wait = waits_.find(id);
      if (wait != waits_.end()) {
        wait->second.watcher = std::move(watcher);
        return;
      }
    }
    watcher(status);
  }

  void End(int64_t id, const absl::Status& status) {
    Finish watcher;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto wait = waits_.find(id);
      if (wait == waits_.end()) return;
      watcher = std::move(wait->second.watcher);
      waited_ += std::chrono::duration<double>(Clock::now() - wait->second.start).count();
      waits_.erase(wait);
    }
    if (watcher) watcher(status);
  }

  void Stop(const std::string& reason) {
    std::map<int64_t, Wait> stopped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped.swap(waits_);
      stopped_ = reason;
      for (const auto& [id, wait] : stopped) stopped_ids_.insert(id);
    }
    for (auto& [id, wait] : stopped) {
      if (wait.watcher) wait.watcher(absl::DeadlineExceededError(reason));
    }
  }

  // Waits that have begun continue: the ranks that left may have taken part in them.
  void Refuse(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    refused_ = reason;
  }

  // Seconds of all waits that have ended.
  double Total() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waited_;
  }

  // The longest wait: its name, its seconds and its number among all that this process began; if
  // there is none, "", 0 and the number of the last wait.
  std::tuple<std::string, double, int64_t> Longest() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (waits_.empty()) return {"", 0.0, last_};
    const auto& [id, wait] = *waits_.begin();
    return {wait.what, std::chrono::duration<double>(Clock::now() - wait.start).count(), id};
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  double waited_ = 0;
  std::string stopped_;            // why no wait may begin any more
  std::set<int64_t> stopped_ids_;  // for watchers that come late
  std::string refused_;            // who has left, so that none can succeed any more
  std::map<int64_t, Wait> waits_;  // by age
};

}  // namespace

REGISTER_OP("SokBeginWait")
    .Output("id: int64")
    .Attr("what: string")
    .SetIsStateful()
    .SetShapeFn(ScalarShape)
    .Doc("From here on this process waits for what, from all other ranks.");

class BeginWaitOp : public OpKernel {
 public:
  explicit BeginWaitOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("what", &what_));
  }
  void Compute(OpKernelContext* ctx) override {
    Tensor* id;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &id));
    OP_REQUIRES_OK(ctx, Waits::Get().Begin(what_, &id->scalar<int64_t>()()));
  }

 private:
  std::string what_;
};
REGISTER_KERNEL_BUILDER(Name("SokBeginWait").Device(tensorflow::DEVICE_CPU), BeginWaitOp);

REGISTER_OP("SokEndWait")
    .Input("id: int64")
    .SetIsStateful()
    .SetShapeFn(NoOutputs)
    .Doc("The wait is over.");

absl::Status EndWait(OpKernelContext* ctx) {
  Waits::Get().End(ctx->input(0).scalar<int64_t>()(), absl::OkStatus());
  return absl::OkStatus();
}
REGISTER_KERNEL_BUILDER(Name("SokEndWait").Device(tensorflow::DEVICE_CPU), FunctionOp<EndWait>);

REGISTER_OP("SokWatch")
    .Input("id: int64")
    .SetShapeFn(NoOutputs)
    .Doc(
        "Runs as long as the wait; fails where it was stopped. It is not stateful: TensorFlow runs "
        "stateful ops one after the other, so it would keep the wait's end from running.");

class WatchOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;
  void ComputeAsync(OpKernelContext* ctx, DoneCallback done) override {
    const int64_t id = ctx->input(0).scalar<int64_t>()();
    CancellationManager* const cancellation = ctx->cancellation_manager();
    const auto token = cancellation == nullptr ? 0 : cancellation->get_cancellation_token();
    // A step that failed elsewhere must not wait for this op. The call of Watch may end the step,
    // so nothing of the step is touched after it.
    if (cancellation != nullptr) {
      const absl::Status cancelled = absl::CancelledError("the step failed elsewhere");
      const bool registered = cancellation->RegisterCallback(
          token, [id, cancelled] { Waits::Get().End(id, cancelled); });
      if (!registered) Waits::Get().End(id, cancelled);
    }
    Waits::Get().Watch(id, [ctx, done, cancellation, token](const absl::Status& status) {
      if (cancellation != nullptr) cancellation->TryDeregisterCallback(token);
      if (!status.ok()) ctx->SetStatus(status);
      done();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("SokWatch").Device(tensorflow::DEVICE_CPU), WatchOp);

}  // namespace sok

// For a Python thread, which cannot run ops if the program builds a v1 graph.

#define SOK_EXPORT extern "C" __attribute__((visibility("default")))

// The longest present wait: its seconds, its name, and its number among all waits of the process;
// 0, "" and the number of waits if there is none.
SOK_EXPORT double sok_longest_wait(char* what, int64_t size, int64_t* number) {
  const auto [name, seconds, id] = sok::Waits::Get().Longest();
  std::snprintf(what, size, "%s", name.c_str());
  *number = id;
  return seconds;
}

// Seconds of all waits of this process that have ended.
SOK_EXPORT double sok_waited_seconds() { return sok::Waits::Get().Total(); }

// Ends all waits of this process and refuses later ones: they raise the reason.
SOK_EXPORT void sok_stop_waits(const char* reason) { sok::Waits::Get().Stop(reason); }

// Refuses new waits: each raises its name and the reason.
SOK_EXPORT void sok_refuse_waits(const char* reason) { sok::Waits::Get().Refuse(reason); }
