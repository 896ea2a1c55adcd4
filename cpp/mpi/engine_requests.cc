// How the engine's thread carries out requests, from `Begin` to the answer.
#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "cpp/mpi/engine.h"

namespace sok {
namespace {

std::string Disagree(const std::string& key, int rank, const MessageHead& head, int other,
                     const MessageHead& received) {
  const auto said = [](int r, const MessageHead& h) {
    return "rank " + std::to_string(r) + " has " + std::to_string(h.rows) + " rows of " +
           std::to_string(h.row_bytes) + " bytes, dtype " + std::to_string(h.dtype) + ", root " +
           std::to_string(h.root);
  };
  return "all ranks must give '" + key +
         "' the same dtype and row shape. Received: " + said(rank, head) + "; " +
         said(other, received);
}

bool SameRows(const MessageHead& a, const MessageHead& b) {
  return a.dtype == b.dtype && a.row_bytes == b.row_bytes;
}

}  // namespace

void Engine::Begin(const std::shared_ptr<Active>& active) {
  const Request& request = *active->request;
  MessageHead head;
  head.from = world().me;
  head.dtype = request.dtype;
  head.row_bytes = request.row_bytes;
  const auto* const collective = dynamic_cast<const Collective*>(&request);
  if (collective == nullptr) return BeginExchange(active, head);
  head.kind = MessageHead::kReady;
  head.rows = collective->count;
  head.root = collective->root;
  channels_[request.key].ready.push_back(active);
  if (request.group->me != 0) {
    SendHead(request.group->ranks[0], head, "", active);
  } else {
    channels_[request.key].ready_ranks[head.from].push_back(head);
    CountReady(request.key);
  }
}

void Engine::BeginExchange(const std::shared_ptr<Active>& active, MessageHead head) {
  const auto& exchange = static_cast<const Exchange&>(*active->request);
  const RankGroup& group = *exchange.group;
  const int size = static_cast<int>(group.ranks.size());
  active->arrived.resize(size);
  active->missing = size - 1;
  for (int i = 1; i < size; ++i) SendBlock(active, (group.me + i) % size, head);
  head.rows = exchange.rows[group.me];
  active->arrived[group.me].head = head;
  Channel& channel = channels_[exchange.key];
  channel.open.push_back(active);
  for (int place = 0; place < size; ++place) {
    auto& blocks = channel.blocks[group.ranks[place]];
    if (blocks.empty()) continue;
    Message message = std::move(blocks.front());
    blocks.pop_front();
    TakeBlock(active, std::move(message));
  }
  if (size == 1) ReceiveBlocks(active);
}

void Engine::SendBlock(const std::shared_ptr<Active>& active, int place, MessageHead head) {
  const auto& exchange = static_cast<const Exchange&>(*active->request);
  const int to = exchange.group->ranks[place];
  head.rows = exchange.rows[place];
  const int64_t bytes = head.rows * head.row_bytes;
  const int64_t room = kMessageBytes - static_cast<int64_t>(sizeof(head) + exchange.key.size());
  if (bytes <= room) {
    std::string block(bytes, '\0');
    if (bytes > 0) std::memcpy(block.data(), exchange.blocks[place], bytes);
    return SendHead(to, head, block, active);
  }
  int& next = next_tag_[to];
  head.tag = next;
  next = next == kLastBlockTag ? kFirstBlockTag : next + 1;
  SendHead(to, head, "", active);
  for (int64_t at = 0; at < bytes; at += kPieceBytes) {
    const int piece = static_cast<int>(std::min(kPieceBytes, bytes - at));
    Add(mpi_->Isend(exchange.blocks[place] + at, piece, to, head.tag, comm_), active);
  }
}

void Engine::SendHead(int to, MessageHead head, const std::string& text,
                      const std::shared_ptr<Active>& active) {
  const std::string& key = active->request->key;
  head.from = world().me;
  head.key_bytes = static_cast<int32_t>(key.size());
  head.block_bytes = static_cast<int32_t>(text.size());
  const size_t bytes = sizeof(head) + key.size() + text.size();
  auto message = std::shared_ptr<char[]>(new char[bytes]);
  std::memcpy(message.get(), &head, sizeof(head));
  std::memcpy(message.get() + sizeof(head), key.data(), key.size());
  std::memcpy(message.get() + sizeof(head) + key.size(), text.data(), text.size());
  Mpi::Handle request = mpi_->Isend(message.get(), static_cast<int>(bytes), to, kHeadTag, comm_);
  if (!mpi_->Test(&request)) Add(request, active, std::move(message));
}

// Takes what has arrived; returns whether anything has.
bool Engine::Receive() {
  bool received = false;
  while (mpi_->Test(&inbox_request_)) {
    received = true;
    Message message;
    std::memcpy(&message.head, inbox_.get(), sizeof(message.head));
    const char* const key = inbox_.get() + sizeof(message.head);
    message.key.assign(key, message.head.key_bytes);
    message.block.assign(key + message.head.key_bytes, message.head.block_bytes);
    inbox_request_ = mpi_->IrecvFromAny(inbox_.get(), kMessageBytes, kHeadTag, comm_);
    Accept(std::move(message));
  }
  return received;
}

void Engine::Accept(Message message) {
  const MessageHead head = message.head;
  Channel& channel = channels_[message.key];
  if (head.kind == MessageHead::kReady) {
    channel.ready_ranks[head.from].push_back(head);
    return CountReady(message.key);
  }
  if (head.kind == MessageHead::kGo) return Go(&channel, message.block);
  if (head.tag != 0 && !tags_[head.from].insert(head.tag).second) {
    throw std::runtime_error("rank " + std::to_string(head.from) + " has sent " +
                             std::to_string(kLastBlockTag) + " blocks that nobody has received");
  }
  for (const auto& active : channel.open) {
    const auto& ranks = active->request->group->ranks;
    const auto place = std::find(ranks.begin(), ranks.end(), head.from) - ranks.begin();
    if (active->arrived[place].head.from < 0) return TakeBlock(active, std::move(message));
  }
  channel.blocks[head.from].push_back(std::move(message));
}

void Engine::TakeBlock(const std::shared_ptr<Active>& active, Message message) {
  const auto& ranks = active->request->group->ranks;
  const auto place = std::find(ranks.begin(), ranks.end(), message.head.from) - ranks.begin();
  active->arrived[place] = std::move(message);
  if (--active->missing == 0) ReceiveBlocks(active);
}

// All blocks of an exchange have been announced.
void Engine::ReceiveBlocks(const std::shared_ptr<Active>& active) {
  auto& exchange = static_cast<Exchange&>(*active->request);
  auto& open = channels_[exchange.key].open;
  open.erase(std::find(open.begin(), open.end(), active));
  const RankGroup& group = *exchange.group;
  const MessageHead& mine = active->arrived[group.me].head;
  std::vector<int64_t> rows;
  int64_t bytes = 0;
  for (const Message& message : active->arrived) {
    rows.push_back(message.head.rows);
    bytes += message.head.rows * message.head.row_bytes;
    if (active->outcome.kind == Outcome::kDone && !SameRows(message.head, mine)) {
      active->outcome = {Outcome::kMismatch,
                         Disagree(exchange.key, mine.from, mine, message.head.from, message.head)};
    }
  }
  char* to = nullptr;
  if (active->outcome.kind == Outcome::kDone) {
    to = exchange.allocate(rows);
  } else {  // what has been sent must be received
    active->unwanted.reset(new char[bytes]);
    to = active->unwanted.get();
  }
  active->posted = true;
  for (int place = 0; place < static_cast<int>(rows.size()); ++place) {
    const Message& message = active->arrived[place];
    const int64_t size = message.head.rows * message.head.row_bytes;
    if (place == group.me) {
      if (size > 0) std::memcpy(to, exchange.blocks[place], size);
    } else {
      ReceiveBlock(active, message, to);
    }
    to += size;
  }
  AnswerIfOver(active);
}

void Engine::ReceiveBlock(const std::shared_ptr<Active>& active, const Message& message, char* to) {
  const MessageHead& head = message.head;
  const int64_t bytes = head.rows * head.row_bytes;
  if (head.tag == 0) {
    if (bytes > 0) std::memcpy(to, message.block.data(), bytes);
    return;
  }
  for (int64_t at = 0; at < bytes; at += kPieceBytes) {
    const int piece = static_cast<int>(std::min(kPieceBytes, bytes - at));
    Add(mpi_->Irecv(to + at, piece, head.from, head.tag, comm_), active);
  }
}

// Begins a collective on all ranks if all have come to it.
void Engine::CountReady(const std::string& key) {
  Channel& channel = channels_[key];
  if (channel.ready.empty()) return;
  const RankGroup& group = *channel.ready.front()->request->group;
  for (const int rank : group.ranks) {
    if (channel.ready_ranks[rank].empty()) return;
  }
  MessageHead mine = channel.ready_ranks[world().me].front();
  std::string problem;
  for (const int rank : group.ranks) {
    const MessageHead head = channel.ready_ranks[rank].front();
    channel.ready_ranks[rank].pop_front();
    const bool same = SameRows(head, mine) && head.rows == mine.rows && head.root == mine.root;
    if (!same && problem.empty()) problem = Disagree(key, mine.from, mine, rank, head);
  }
  mine.kind = MessageHead::kGo;
  for (const int rank : group.ranks) {
    if (rank != world().me) SendHead(rank, mine, problem, channel.ready.front());
  }
  Go(&channel, problem);
}

void Engine::Go(Channel* channel, const std::string& problem) {
  if (channel->ready.empty()) {
    throw std::runtime_error("a collective has begun that this rank has not come to");
  }
  const std::shared_ptr<Active> active = channel->ready.front();
  channel->ready.pop_front();
  if (!problem.empty()) {
    active->outcome = {Outcome::kMismatch, problem};
  } else {
    Post(active);
  }
  active->posted = true;
  AnswerIfOver(active);
}

// In pieces, because MPI counts in int32. Of a scattered sum each rank's part is a sum of its own.
void Engine::Post(const std::shared_ptr<Active>& active) {
  const auto& collective = static_cast<const Collective&>(*active->request);
  const RankGroup& group = *collective.group;
  const int64_t width = collective.row_bytes;
  const bool adds = collective.kind != Collective::kBroadcast;
  const int64_t most = (adds ? kSumPieceBytes : kPieceBytes) / width;
  const bool scatters = collective.kind == Collective::kScatteredSum;
  const std::vector<int64_t> whole = {collective.count};
  const char* in = collective.in;
  char* out = collective.out;
  int root = scatters ? 0 : collective.root;
  for (const int64_t part : scatters ? collective.parts : whole) {
    for (int64_t left = part; left > 0; left -= most) {
      const int n = static_cast<int>(std::min(most, left));
      if (scatters) {
        Add(mpi_->Ireduce(in, out, n, collective.type, root, group.comm), active);
      } else if (adds) {
        Add(mpi_->Iallreduce(in, out, n, collective.type, group.comm), active);
      } else {
        Add(mpi_->Ibcast(out, static_cast<int>(n * width), root, group.comm), active);
      }
      in += n * width;
      if (!scatters || root == group.me) out += n * width;
    }
    ++root;
  }
}

void Engine::Add(Mpi::Handle request, const std::shared_ptr<Active>& active,
                 std::shared_ptr<char[]> bytes) {
  ++active->pending;
  pending_.push_back({request, active, std::move(bytes)});
}

// Asks MPI about all requests; returns whether one has ended.
bool Engine::Progress() {
  bool moved = false;
  for (size_t i = 0; i < pending_.size();) {
    if (!mpi_->Test(&pending_[i].request)) {
      ++i;
      continue;
    }
    moved = true;
    const std::shared_ptr<Active> active = std::move(pending_[i].of);
    if (i + 1 < pending_.size()) pending_[i] = std::move(pending_.back());
    pending_.pop_back();
    --active->pending;
    AnswerIfOver(active);
  }
  return moved;
}

void Engine::AnswerIfOver(const std::shared_ptr<Active>& active) {
  if (!active->posted || active->pending > 0) return;
  for (const Message& message : active->arrived) {
    if (message.head.tag != 0) tags_[message.head.from].erase(message.head.tag);
  }
  const std::shared_ptr<Active> keep = active;  // `active` may be an element of what is changed
  keep->Answer(keep->outcome);
  active_.erase(keep);
}

}  // namespace sok
