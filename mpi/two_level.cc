// The two ways between local leaders: the MPI's own nonblocking allreduce, or
// collective::NodeAllreduce on the MPI's messages.
#include "two_level.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "between.h"
#include "collective/node_allreduce.h"
#include "collective/two_level.h"
#include "receives.h"

namespace nostall::mpi {
namespace {

using collective::Extent;
using collective::TwoLevelMessage;

constexpr const char* kOperation = "allreduce";
constexpr uint64_t kPartBytes = 1 << 20;
constexpr uint32_t kMostParts = 1024;
constexpr uint32_t kMostPartsOfExchange = 64;
constexpr size_t kAtOnce = 16;  // messages that leave at a time

using Buffer = std::unique_ptr<std::byte[]>;
Buffer buffer_of(uint64_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

// The MPI's allreduce of each part, in place.
class MpiLeaders final : public collective::Leaders {
 public:
  MpiLeaders(CommunicatorState& state, MPI_Datatype type, MPI_Op op)
      : state_(state), type_(type), op_(op), requests_(state, kOperation) {}

  std::byte* begin(const TwoLevelMessage& message) override {
    message_ = message;
    return message.out;
  }
  void start(uint32_t part) override {
    const Extent extent = message_.part(part);
    requests_.start([&](MPI_Request* request) {
      return PMPI_Iallreduce(MPI_IN_PLACE, message_.out + message_.offset(extent.begin),
                             static_cast<int>(extent.count), type_, op_, state_.leaders, request);
    });
  }
  void finish(uint32_t part) override { requests_.wait(part); }

 private:
  CommunicatorState& state_;
  const MPI_Datatype type_;
  const MPI_Op op_;
  LeaderRequests requests_;
  TwoLevelMessage message_;
};

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
    keep(std::make_shared<std::pair<std::deque<Buffer>, std::deque<std::vector<uint8_t>>>>(
        std::move(memory_), std::move(words_)));
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
  bool look(collective::NodeAllreduce& allreduce) {
    start();
    std::vector<Received> received;
    check(receives_.collect(received));
    if (received.empty()) {
      lookout_.look();
      return false;
    }
    for (const Received& message : received) allreduce.received(message.cookie, message.bytes);
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
      if (left > 0) lookout_.look();
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

// By order of arrival. What others send goes to the result while later parts of the input are still
// needed, so the two are apart.
class ArrivalLeaders final : public collective::Leaders {
 public:
  ArrivalLeaders(CommunicatorState& state, const collective::Reducer& reducer)
      : state_(state), messages_(state, reducer) {}

  std::byte* begin(const TwoLevelMessage& message) override {
    message_ = message;
    const uint64_t bytes = message.offset(message.count);
    std::byte* const sums = messages_.scratch(bytes);
    result_ = message.in == message.out ? messages_.scratch(bytes) : message.out;
    finished_.assign(message.parts, false);
    collective::NodeAllreduceShape shape;
    int rank = 0, ranks = 1;
    PMPI_Comm_rank(state_.leaders, &rank);
    PMPI_Comm_size(state_.leaders, &ranks);
    shape.rank = static_cast<uint32_t>(rank);
    shape.ranks = static_cast<uint32_t>(ranks);
    shape.count = message.count;
    shape.element = message.reducer->element_bytes();
    shape.chunks = message.parts;
    allreduce_.emplace(shape, messages_, sums, result_,
                       [this](uint32_t c) { finished_[c] = true; });
    state_.node->check();  // on one that has ended nothing is started
    allreduce_->listen();
    while (messages_.look(*allreduce_)) {
    }
    allreduce_->announce();
    return sums;
  }
  void start(uint32_t part) override {
    messages_.restart();
    allreduce_->ready(part);
    messages_.look(*allreduce_);
  }
  void finish(uint32_t part) override {
    messages_.restart();
    while (!finished_[part]) messages_.look(*allreduce_);
    if (result_ == message_.out) return;
    const Extent extent = message_.part(part);
    const uint64_t at = message_.offset(extent.begin);
    messages_.copy(message_.out + at, result_ + at, message_.offset(extent.count));
  }
  void end() override {
    messages_.restart();
    while (!allreduce_->done()) messages_.look(*allreduce_);
    messages_.flush();
  }

 private:
  CommunicatorState& state_;
  LeaderMessages messages_;
  std::optional<collective::NodeAllreduce> allreduce_;
  TwoLevelMessage message_;
  std::byte* result_ = nullptr;
  std::vector<bool> finished_;
};

bool is_by_arrival() noexcept {
  static const bool chosen = [] {
    const char* between = std::getenv("NOSTALL_MPI_BETWEEN");
    return between != nullptr && std::string_view(between) == "arrival";
  }();
  return chosen;
}

}  // namespace

void two_level_allreduce(CommunicatorState& state, const std::byte* in, std::byte* out,
                         uint64_t count, MPI_Datatype type, MPI_Op op, const MpiReducer& reducer) {
  const bool by_arrival = is_by_arrival();
  const uint32_t parts = collective::parts_of(count * reducer.element_bytes(), kPartBytes,
                                              by_arrival ? kMostPartsOfExchange : kMostParts);
  const TwoLevelMessage message{in, out, count, &reducer.get(), parts};
  std::optional<MpiLeaders> plain;
  std::optional<ArrivalLeaders> arrival;
  collective::Leaders* leaders = nullptr;
  if (state.node_rank == 0) {
    if (by_arrival) {
      leaders = &arrival.emplace(state, reducer.get());
    } else {
      leaders = &plain.emplace(state, type, op);
    }
  }
  collective::two_level_allreduce(*state.node, leaders, message);
}

}  // namespace nostall::mpi
