// The part between nodes as collective::NodeAllreduce on MPI's messages, chunk by chunk between the
// node's reduction and its broadcast.
#include "two_level.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "between.h"
#include "collective/node_allreduce.h"
#include "receives.h"

namespace nostall::mpi {
namespace {

using collective::Extent;

constexpr const char* kOperation = "allreduce";
constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kMostChunks = 64;
constexpr size_t kAtOnce = 16;  // messages that leave at a time

using Buffer = std::unique_ptr<std::byte[]>;
Buffer buffer_of(uint64_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

class LeaderMessages final : public collective::Messages {
 public:
  LeaderMessages(CommunicatorState& state, const collective::Reducer& reducer)
      : state_(state), reducer_(reducer), lookout_(state, kOperation) {}
  ~LeaderMessages() override {
    for (MPI_Request& request : receives_.requests()) {
      if (request != MPI_REQUEST_NULL) PMPI_Cancel(&request);
    }
    give_up(state_, receives_.requests());
    give_up(state_, leaving_);
    if (receives_.requests().empty() && leaving_.empty()) return;
    // The MPI may use it as long as it lasts.
    keep(std::make_shared<std::deque<Buffer>>(std::move(memory_)));
  }
  LeaderMessages(const LeaderMessages&) = delete;
  LeaderMessages& operator=(const LeaderMessages&) = delete;

  void send(uint32_t to, uint32_t tag, const void* data, uint64_t bytes) override {
    queue_.push_back({static_cast<int>(to), static_cast<int>(tag), static_cast<int>(bytes), data});
    start();
  }
  void receive(uint32_t from, uint32_t tag, void* data, uint64_t bytes, uint64_t cookie) override {
    check(PMPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(from),
                     static_cast<int>(tag), state_.leaders, receives_.add(cookie)));
  }
  void fold(std::byte* into, const std::byte* from, uint64_t count, bool first) override {
    if (first) {
      copy(into, from, count * reducer_.element_bytes());
    } else {
      reducer_.combine(into, into, from, count);
    }
  }
  void copy(std::byte* into, const std::byte* from, uint64_t bytes) override {
    if (bytes > 0) std::memcpy(into, from, bytes);
  }
  std::byte* scratch(uint64_t bytes) override {
    return memory_.emplace_back(buffer_of(bytes + 1)).get();
  }

  // Hands on what was received; false if nothing was.
  bool look(collective::NodeAllreduce& exchange) {
    start();
    std::vector<Received> received;
    check(receives_.collect(received));
    if (received.empty()) {
      lookout_.look();
      return false;
    }
    for (const Received& message : received) exchange.received(message.cookie, message.bytes);
    lookout_.restart();
    return true;
  }
  void flush() {
    restart();
    for (size_t left = queue_.size() + leaving_.size(); left > 0;) {
      start();
      const size_t now = queue_.size() + leaving_.size();
      if (now < left) restart();
      left = now;
      lookout_.look();
    }
  }
  // After this rank has waited for its own node.
  void restart() { lookout_.restart(); }

 private:
  struct Letter {
    int to, tag, bytes;
    const void* data;
  };
  void start() {
    int result = MPI_SUCCESS;
    std::erase_if(leaving_, [&result](MPI_Request& request) {
      int gone = 0;
      const int error = PMPI_Test(&request, &gone, MPI_STATUS_IGNORE);
      if (error != MPI_SUCCESS) result = error;
      return error != MPI_SUCCESS || gone != 0;
    });
    check(result);
    while (leaving_.size() < kAtOnce && !queue_.empty()) {
      const Letter& letter = queue_.front();
      check(PMPI_Isend(letter.data, letter.bytes, MPI_BYTE, letter.to, letter.tag, state_.leaders,
                       &leaving_.emplace_back(MPI_REQUEST_NULL)));
      queue_.pop_front();
    }
  }

  void check(int result) { check_between(state_, kOperation, result); }

  CommunicatorState& state_;
  const collective::Reducer& reducer_;
  Lookout lookout_;
  Receives receives_;
  std::vector<MPI_Request> leaving_;
  std::deque<Letter> queue_;
  std::deque<Buffer> memory_;
};

}  // namespace

bool allreduces_by_arrival() noexcept {
  static const bool chosen = [] {
    const char* between = std::getenv("NOSTALL_MPI_BETWEEN");
    return between != nullptr && std::string_view(between) == "exchange";
  }();
  return chosen;
}

void arrival_allreduce(CommunicatorState& state, const std::byte* in, std::byte* out,
                       uint64_t count, const MpiReducer& reducer) {
  collective::NodeAllreduceShape shape;
  shape.count = count;
  shape.element = reducer.element_bytes();
  shape.chunks = static_cast<uint32_t>(
      std::clamp<uint64_t>(count * shape.element / kChunkBytes, 1, kMostChunks));
  const auto extent = [&](uint32_t c) { return collective::part_of(count, c, shape.chunks); };
  if (state.node_rank != 0) {
    for (uint32_t c = 0; c < shape.chunks; ++c) {
      const Extent part = extent(c);
      std::byte* const at = out + part.begin * shape.element;
      state.node->reduce(in + part.begin * shape.element, at, part.count, reducer.get(), 0);
    }
    for (uint32_t c = 0; c < shape.chunks; ++c) {
      const Extent part = extent(c);
      state.node->broadcast(out + part.begin * shape.element, part.count * shape.element, 0);
    }
    return;
  }
  int rank = 0, ranks = 1;
  PMPI_Comm_rank(state.leaders, &rank);
  PMPI_Comm_size(state.leaders, &ranks);
  shape.rank = static_cast<uint32_t>(rank);
  shape.ranks = static_cast<uint32_t>(ranks);
  // What others send goes to the result while later chunks of the input are still needed.
  const uint64_t bytes = count * shape.element;
  std::vector<bool> finished(shape.chunks, false);
  LeaderMessages peers(state, reducer.get());
  std::byte* const sum = peers.scratch(bytes);
  std::byte* const result = in == out ? peers.scratch(bytes) : out;
  collective::NodeAllreduce exchange(shape, peers, sum, result,
                                     [&](uint32_t c) { finished[c] = true; });
  state.node->check();  // on one that has ended nothing is started
  exchange.listen();
  while (peers.look(exchange)) {
  }
  exchange.announce();
  for (uint32_t c = 0; c < shape.chunks; ++c) {
    const Extent part = extent(c);
    const uint64_t at = part.begin * shape.element;
    state.node->reduce(in + at, sum + at, part.count, reducer.get(), 0);
    peers.restart();
    exchange.ready(c);
    peers.look(exchange);
  }
  for (uint32_t c = 0; c < shape.chunks; ++c) {
    while (!finished[c]) peers.look(exchange);
    const Extent part = extent(c);
    const uint64_t at = part.begin * shape.element;
    if (result != out) peers.copy(out + at, result + at, part.count * shape.element);
    state.node->broadcast(out + at, part.count * shape.element, 0);
    peers.restart();
  }
  while (!exchange.done()) peers.look(exchange);
  peers.flush();
}

}  // namespace nostall::mpi
