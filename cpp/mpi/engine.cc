#include "cpp/mpi/engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <stdexcept>

namespace sok {
namespace {

// While a request waits, the thread looks for messages: without a pause at first, then with pauses
// that are a part of the time waited, which bounds what a pause may add. On 2 ranks and 2 cores, with
// 20,000 ns in place of `kSpin` a sum of 13 MiB took 1.5 times as long, with 400,000 no less. Pauses of
// an eighth added up where a sum took several turns of 4 ranks.
constexpr int64_t kSpin = 100'000;            // ns
constexpr int64_t kShortest = 20'000;         // ns
constexpr int64_t kLongest = 2'000'000;       // ns
constexpr int64_t kWaitedPerPause = 32;       // a pause is this part of the time waited
constexpr int64_t kIdle = 100'000'000;        // ns; lets MPI take up what others have sent
constexpr unsigned long kTimerSlack = 1'000;  // ns; Linux adds 50,000 to a pause by default

std::atomic<bool> forked{false};
std::atomic<bool> interrupted{false};
struct sigaction own_interrupt;  // Python's

// How many requests wait. While one does, the engine hands the signal on to Python.
std::atomic<int> waiting{0};

void NoteInterrupt(int number) {
  if (waiting > 0 && !forked) {
    interrupted = true;
  } else {
    own_interrupt.sa_handler(number);
  }
}

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Engine& Engine::Get() {
  static auto* const engine = new Engine;  // never destroyed: MPI may still hold its buffers
  return *engine;
}

void Engine::Start(const std::string& library) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (started_) return;
  std::string problem;
  thread_ = std::thread([this, library, &problem] { Run(library, &problem); });
  ended_.wait(lock, [this] { return started_ || closed_; });
  if (started_) return;
  lock.unlock();
  thread_.join();
  closed_ = false;
  throw std::runtime_error(problem);
}

void Engine::Run(const std::string& library, std::string* problem) {
  try {
    mpi_ = Mpi::Load(library);
    initialised_here_ = !mpi_->Initialized();
    if (!(initialised_here_ ? mpi_->InitThread() : mpi_->QueryThread())) {
      throw std::runtime_error(
          "MPI must let several threads call it (MPI_THREAD_MULTIPLE). Received: a lower level" +
          std::string(initialised_here_ ? "" : ", asked for by the program that called MPI_Init"));
    }
    comm_ = mpi_->Duplicate(mpi_->World());
    setup_ = mpi_->Duplicate(comm_);
    world_.me = mpi_->Rank(comm_);
    for (int r = 0; r < mpi_->Size(comm_); ++r) world_.ranks.push_back(r);
    const Mpi::Handle host = mpi_->SplitByHost(setup_, world_.me);
    local_rank_ = mpi_->Rank(host);
    local_size_ = mpi_->Size(host);
    world_.comm = mpi_->Duplicate(comm_);
    next_tag_.assign(world_.ranks.size(), kFirstBlockTag);
    inbox_ = std::make_unique<char[]>(kMessageBytes);
    inbox_request_ = mpi_->IrecvFromAny(inbox_.get(), kMessageBytes, kHeadTag, comm_);
  } catch (const std::exception& error) {
    *problem = error.what();
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    ended_.notify_all();
    return;
  }
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    started_ = true;
  }
  ended_.notify_all();
  quiet_since_ = Now();
  bool goes_on = true;
  while (goes_on) {
    try {
      goes_on = Take();
      if (!stopped_ && (Receive() | Progress())) {
        quiet_since_ = Now();
      } else if (goes_on) {
        Wait();
      }
    } catch (const std::exception& error) {
      StopNow("rank " + std::to_string(world().me) + ": " + error.what());
    }
  }
  End();
}

void Engine::Submit(std::unique_ptr<Request> request) {
  if (forked) {
    request->done({Outcome::kStopped,
                   "a process that was forked from a rank has no part in its "
                   "exchanges"});
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_ || closing_) {
    const std::string reason = stop_reason_.empty() ? "MPI was shut down" : stop_reason_;
    lock.unlock();
    request->done({Outcome::kStopped, reason});
    return;
  }
  incoming_.push_back(std::move(request));
  lock.unlock();
  wake_.notify_one();
}

void Engine::Cancel(int64_t id, const std::string& why) {
  if (forked) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancelled_.emplace_back(id, why);
  }
  wake_.notify_one();
}

void Engine::Stop(const std::string& reason) {
  if (forked) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stop_reason_.empty()) stop_reason_ = reason;
  }
  wake_.notify_one();
}

// A thread that waits for an op cannot run Python's handler of the signal. So the op must end.
void Engine::OnInterrupt(int (*ends)()) {
  if (ends_on_interrupt_.exchange(ends) != nullptr) return;
  sigaction(SIGINT, nullptr, &own_interrupt);
  if (own_interrupt.sa_handler == SIG_IGN || own_interrupt.sa_handler == SIG_DFL) return;
  if (own_interrupt.sa_flags & SA_SIGINFO) return;  // not Python's
  struct sigaction noting = own_interrupt;
  noting.sa_handler = NoteInterrupt;
  sigaction(SIGINT, &noting, nullptr);
}

void Engine::ObeyInterrupt() {
  if (!interrupted.exchange(false)) return;
  if (ends_on_interrupt_.load()() != 0) {
    CancelAll("interrupted by SIGINT");
  } else {
    own_interrupt.sa_handler(SIGINT);
  }
}

bool Engine::Close(double seconds) {
  if (forked) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_) return true;
  closing_ = true;
  wake_.notify_one();
  const auto limit = std::chrono::duration<double>(seconds);
  if (!ended_.wait_for(lock, limit, [this] { return closed_; })) return false;
  lock.unlock();
  if (thread_.joinable()) thread_.join();
  return true;
}

void Engine::Meet(const std::string& key) {
  auto exchange = std::make_unique<Exchange>();
  exchange->key = key;
  exchange->group = &world();
  exchange->blocks.assign(world().ranks.size(), nullptr);
  exchange->rows.assign(world().ranks.size(), 0);
  exchange->allocate = [](const std::vector<int64_t>&) { return nullptr; };
  std::promise<Outcome> promise;
  exchange->done = [&promise](const Outcome& outcome) { promise.set_value(outcome); };
  Submit(std::move(exchange));
  const Outcome outcome = promise.get_future().get();
  if (outcome.kind != Outcome::kDone) throw std::runtime_error(outcome.text);
}

int Engine::Divide(const std::vector<std::vector<int>>& groups) {
  auto group = std::make_unique<RankGroup>();
  int color = -1;
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto place = std::find(groups[i].begin(), groups[i].end(), world().me);
    if (place == groups[i].end()) continue;
    color = static_cast<int>(i);
    group->ranks = groups[i];
    group->me = static_cast<int>(place - groups[i].begin());
  }
  for (const int rank : group->ranks) group->prefix += std::to_string(rank) + ",";
  // Nobody waits within MPI for a rank that does not come.
  Meet("groups of ranks");
  const std::lock_guard<std::mutex> lock(dividing_);
  group->comm = mpi_->Split(setup_, color, group->me);
  groups_.push_back(std::move(group));
  return static_cast<int>(groups_.size());
}

const RankGroup& Engine::group(int number) {
  const std::lock_guard<std::mutex> lock(dividing_);
  return number == 0 ? world_ : *groups_[number - 1];
}

// Takes over what callers have handed in. Returns false when the thread should end.
bool Engine::Take() {
  std::deque<std::unique_ptr<Request>> incoming;
  std::deque<std::pair<int64_t, std::string>> cancelled;
  std::string reason;
  bool closing;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    incoming.swap(incoming_);
    cancelled.swap(cancelled_);
    if (!stopped_) reason = stop_reason_;
    closing = closing_;
  }
  if (interrupted) ObeyInterrupt();
  waiting = static_cast<int>(active_.size() + incoming.size());
  if (!incoming.empty()) quiet_since_ = Now();
  for (auto& request : incoming) {
    auto active = std::make_shared<Active>();
    active->request = std::move(request);
    active_.insert(active);
    if (!stopped_) Begin(active);
  }
  for (const auto& [id, why] : cancelled) {
    for (const auto& active : active_) {
      if (id == 0 || active->request->id == id) active->Answer({Outcome::kCancelled, why});
    }
  }
  if (!reason.empty()) StopNow(reason);
  if (stopped_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& active : active_) active->Answer({Outcome::kStopped, stop_reason_});
  }
  return !closing;
}

// The requests to MPI stay, and so do their buffers.
void Engine::StopNow(const std::string& reason) {
  stopped_ = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_reason_.empty()) stop_reason_ = reason;
  for (const auto& active : active_) active->Answer({Outcome::kStopped, stop_reason_});
}

void Engine::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto called = [this] {
    return !incoming_.empty() || !cancelled_.empty() || closing_ ||
           (!stopped_ && !stop_reason_.empty());
  };
  if (called()) return;
  int64_t pause = kIdle;
  if (!stopped_ && !(active_.empty() && pending_.empty())) {
    const int64_t waited = Now() - quiet_since_;
    if (waited < kSpin) {
      lock.unlock();
      sched_yield();
      return;
    }
    pause = std::clamp(waited / kWaitedPerPause, kShortest, kLongest);
  }
  wake_.wait_for(lock, std::chrono::nanoseconds(pause), called);
  lock.unlock();
  // The program, or a library of its, may have ended MPI without a word.
  if (!stopped_ && mpi_->Finalized()) StopNow("the program has called MPI_Finalize");
}

void Engine::End() {
  for (const auto& active : active_) active->Answer({Outcome::kStopped, "MPI was shut down"});
  try {
    if (!mpi_->Finalized()) {
      if (!stopped_) mpi_->Cancel(&inbox_request_);
      if (initialised_here_) mpi_->Finalize();
    }
  } catch (const std::exception&) {
    // There is nobody left to tell, and nothing that could be done.
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  ended_.notify_all();
}

}  // namespace sok
