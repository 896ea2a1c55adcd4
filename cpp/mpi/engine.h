// Exchanges and collectives between the processes of a job, on the one thread that speaks MPI.
//
// A request is handed in with `Submit` and has no thread of its own. What it reads and writes stays
// alive until MPI has left it, also when its caller was told to wait no longer.
//
//     Exchange    each rank sends each rank a block    a message per block, met by its key
//     Collective  MPI's own: sum, part of a sum, broadcast
//
// MPI matches its collectives by the order of calls. So the first rank of a group hears of each rank
// that has come to a key, and when all have come it says so. All begin in that order, whatever the
// order in which they came.
//
//     rank r                    first rank of the group
//       -- ready, key ------------>
//       <------------ go, key --    once all are ready: MPI_Iallreduce, ...
#ifndef SOK_MPI_ENGINE_H_
#define SOK_MPI_ENGINE_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpp/mpi/library.h"
#include "cpp/mpi/message.h"

namespace sok {

// Ranks that meet each other; `ranks` are those of the job.
struct RankGroup {
  std::vector<int> ranks;
  int me = 0;  // this process's place among them
  Mpi::Handle comm = 0;
  std::string prefix;  // of its keys
};

struct Outcome {
  enum Kind { kDone, kStopped, kCancelled, kMismatch };
  Kind kind = kDone;
  std::string text;
};

struct Request {
  virtual ~Request() = default;
  std::string key;  // the same on all ranks
  const RankGroup* group = nullptr;
  // All ranks must agree on these.
  int32_t dtype = 0;
  int64_t row_bytes = 0;
  // Called once, on the engine's thread: must return at once.
  std::function<void(const Outcome&)> done;
  std::shared_ptr<void> buffers;  // kept until MPI has left them
  int64_t id = 0;                 // for Cancel
};

struct Exchange : Request {
  std::vector<const char*> blocks;  // [group]
  std::vector<int64_t> rows;        // [group], in each block
  // Returns where all blocks go, in rank order, given their rows. May throw std::bad_alloc.
  std::function<char*(const std::vector<int64_t>& rows)> allocate;
};

struct Collective : Request {
  enum Kind { kSum, kScatteredSum, kBroadcast };
  Kind kind = kSum;
  Mpi::Type type = Mpi::Type::kByte;
  int64_t count = 0;           // elements of `in`
  std::vector<int64_t> parts;  // [group], elements that each rank keeps of a scattered sum
  int root = 0;                // in the group
  const char* in = nullptr;    // of a broadcast: unused, `out` is both
  char* out = nullptr;
};

class Engine {
 public:
  // The engine of this process.
  static Engine& Get();

  // Initialises MPI, unless somebody has, and meets all ranks. Throws std::runtime_error.
  void Start(const std::string& library);
  const RankGroup& world() const { return world_; }
  const RankGroup& group(int number);  // 0: the whole job
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }

  // Divides the ranks; returns the number of this rank's group. Every rank must call it. Waits for
  // all of them. Throws std::runtime_error if that was ended.
  int Divide(const std::vector<std::vector<int>>& groups);

  int64_t NewId() { return ++last_id_; }
  void Submit(std::unique_ptr<Request> request);
  // The caller of a request waits no longer. The request itself goes on: other ranks count on it.
  void Cancel(int64_t id, const std::string& why);
  void CancelAll(const std::string& why) { Cancel(0, why); }
  // Ends all requests, and later ones: they get `reason`.
  void Stop(const std::string& reason);
  // `ends` is asked after a SIGINT while requests wait: whether their callers should wait no longer.
  // Then it also sees to it that Python hears of the signal.
  void OnInterrupt(int (*ends)());
  // Ends the thread, and MPI if this engine has initialised it. All ranks must have come to this;
  // returns false if they have not after `seconds`.
  bool Close(double seconds);

 private:
  // A request that has begun. Its caller has been answered when `done` is empty.
  struct Active {
    std::unique_ptr<Request> request;
    std::vector<Message> arrived;  // of an exchange, by place in the group
    int missing = 0;               // blocks that nobody has announced
    int pending = 0;               // requests to MPI
    bool posted = false;           // what is received is known
    Outcome outcome;
    std::unique_ptr<char[]> unwanted;  // where blocks of ranks that disagree go

    void Answer(const Outcome& told) {
      if (request->done) std::exchange(request->done, nullptr)(told);
    }
  };
  struct Pending {
    Mpi::Handle request;
    std::shared_ptr<Active> of;
    std::shared_ptr<char[]> bytes;  // of a message of the engine's own
  };
  struct Channel {
    std::deque<std::shared_ptr<Active>> open;            // exchanges that miss a block
    std::map<int, std::deque<Message>> blocks;           // by rank: those of later exchanges
    std::deque<std::shared_ptr<Active>> ready;           // collectives
    std::map<int, std::deque<MessageHead>> ready_ranks;  // of them, at the first rank of the group
  };

  void Run(const std::string& library, std::string* problem);
  void Meet(const std::string& key);
  bool Take();
  bool Receive();
  bool Progress();
  void Wait();
  void End();
  void StopNow(const std::string& reason);
  void ObeyInterrupt();

  // engine_requests.cc
  void Begin(const std::shared_ptr<Active>& active);
  void BeginExchange(const std::shared_ptr<Active>& active, MessageHead head);
  void SendBlock(const std::shared_ptr<Active>& active, int place, MessageHead head);
  void Accept(Message message);
  void TakeBlock(const std::shared_ptr<Active>& active, Message message);
  void ReceiveBlocks(const std::shared_ptr<Active>& active);
  void ReceiveBlock(const std::shared_ptr<Active>& active, const Message& message, char* to);
  void CountReady(const std::string& key);
  void Go(Channel* channel, const std::string& problem);
  void Post(const std::shared_ptr<Active>& active);
  void SendHead(int to, MessageHead head, const std::string& text,
                const std::shared_ptr<Active>& active);
  void Add(Mpi::Handle request, const std::shared_ptr<Active>& active,
           std::shared_ptr<char[]> bytes = nullptr);
  void AnswerIfOver(const std::shared_ptr<Active>& active);

  std::unique_ptr<Mpi> mpi_;
  Mpi::Handle comm_ = 0, setup_ = 0;
  RankGroup world_;
  std::vector<std::unique_ptr<RankGroup>> groups_;  // others; under `dividing_`
  std::mutex dividing_;
  int local_rank_ = 0, local_size_ = 1;
  bool initialised_here_ = false;
  std::thread thread_;

  // Shared with callers.
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::deque<std::unique_ptr<Request>> incoming_;
  std::deque<std::pair<int64_t, std::string>> cancelled_;
  std::string stop_reason_;
  std::atomic<int64_t> last_id_{0};
  bool started_ = false, closing_ = false, closed_ = false;

  // Of the engine's thread.
  std::set<std::shared_ptr<Active>> active_;
  std::vector<Pending> pending_;
  std::map<std::string, Channel> channels_;  // by key
  std::map<int, std::set<int>> tags_;        // announced by each rank, and not received yet
  std::vector<int> next_tag_;                // for each rank
  std::unique_ptr<char[]> inbox_;
  Mpi::Handle inbox_request_ = 0;
  bool stopped_ = false;
  int64_t quiet_since_ = 0;  // ns
  std::atomic<int (*)()> ends_on_interrupt_{nullptr};
};

}  // namespace sok

#endif  // SOK_MPI_ENGINE_H_
