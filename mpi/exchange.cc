#include "exchange.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "collective/node_exchange.h"

namespace nostall::mpi {
namespace {

using collective::Extent;

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr uint64_t kMostChunks = 64;
constexpr size_t kAtOnce = 16;  // messages that leave at a time

using Buffer = std::unique_ptr<std::byte[]>;
Buffer buffer_of(uint64_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

class HeadPeers final : public collective::Peers {
 public:
  HeadPeers(MPI_Comm heads, const collective::Reducer& reducer)
      : heads_(heads), reducer_(reducer) {}

  void send(uint32_t to, uint32_t tag, const void* data, uint64_t bytes) override {
    queue_.push_back({static_cast<int>(to), static_cast<int>(tag), static_cast<int>(bytes), data});
    start();
  }
  void receive(uint32_t from, uint32_t tag, void* data, uint64_t bytes, uint64_t cookie) override {
    receives_.emplace_back();
    cookies_.push_back(cookie);
    PMPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, static_cast<int>(from),
               static_cast<int>(tag), heads_, &receives_.back());
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

  // Hands on what has come; false if nothing has.
  bool look(collective::NodeExchange& exchange) {
    start();
    std::vector<int> which(receives_.size());
    std::vector<MPI_Status> status(receives_.size());
    int count = 0;
    PMPI_Testsome(static_cast<int>(receives_.size()), receives_.data(), &count, which.data(),
                  status.data());
    if (count == MPI_UNDEFINED || count == 0) return false;
    std::vector<std::pair<uint64_t, uint64_t>> came;
    for (int i = 0; i < count; ++i) {
      int bytes = 0;
      PMPI_Get_count(&status[static_cast<size_t>(i)], MPI_BYTE, &bytes);
      came.emplace_back(cookies_[static_cast<size_t>(which[static_cast<size_t>(i)])], bytes);
    }
    size_t kept = 0;
    for (size_t i = 0; i < receives_.size(); ++i) {
      if (receives_[i] == MPI_REQUEST_NULL) continue;
      receives_[kept] = receives_[i];
      cookies_[kept++] = cookies_[i];
    }
    receives_.resize(kept);
    cookies_.resize(kept);
    for (const auto& [cookie, bytes] : came) exchange.received(cookie, bytes);
    return true;
  }
  void flush() {
    while (!queue_.empty()) start();
    PMPI_Waitall(static_cast<int>(leaving_.size()), leaving_.data(), MPI_STATUSES_IGNORE);
  }

 private:
  struct Letter {
    int to, tag, bytes;
    const void* data;
  };
  void start() {
    std::erase_if(leaving_, [](MPI_Request& request) {
      int gone = 0;
      PMPI_Test(&request, &gone, MPI_STATUS_IGNORE);
      return gone != 0;
    });
    while (leaving_.size() < kAtOnce && !queue_.empty()) {
      const Letter& letter = queue_.front();
      leaving_.emplace_back();
      PMPI_Isend(letter.data, letter.bytes, MPI_BYTE, letter.to, letter.tag, heads_,
                 &leaving_.back());
      queue_.pop_front();
    }
  }

  MPI_Comm heads_;
  const collective::Reducer& reducer_;
  std::vector<MPI_Request> receives_, leaving_;
  std::vector<uint64_t> cookies_;
  std::deque<Letter> queue_;
  std::deque<Buffer> memory_;
};

}  // namespace

bool exchange_between_nodes() noexcept {
  static const bool chosen = [] {
    const char* between = std::getenv("NOSTALL_MPI_BETWEEN");
    return between != nullptr && std::string_view(between) == "exchange";
  }();
  return chosen;
}

void exchange_allreduce(CommunicatorState& state, const std::byte* in, std::byte* out,
                        uint64_t count, const MpiReducer& reducer) {
  collective::ExchangeShape shape;
  shape.count = count;
  shape.element = reducer.element_bytes();
  shape.chunks = static_cast<uint32_t>(
      std::clamp<uint64_t>(count * shape.element / kChunkBytes, 1, kMostChunks));
  const auto extent = [&](uint32_t c) { return collective::part_of(count, c, shape.chunks); };
  if (state.heads == MPI_COMM_NULL) {
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
  PMPI_Comm_rank(state.heads, &rank);
  PMPI_Comm_size(state.heads, &ranks);
  shape.rank = static_cast<uint32_t>(rank);
  shape.ranks = static_cast<uint32_t>(ranks);
  // What others send goes to the result while later chunks of the input are still needed.
  const uint64_t bytes = count * shape.element;
  const Buffer sum = buffer_of(bytes), aside = in == out ? buffer_of(bytes) : nullptr;
  std::byte* const result = aside ? aside.get() : out;
  std::vector<bool> finished(shape.chunks, false);
  HeadPeers peers(state.heads, reducer.get());
  collective::NodeExchange exchange(shape, peers, sum.get(), result,
                                    [&](uint32_t c) { finished[c] = true; });
  exchange.listen();
  while (peers.look(exchange)) {
  }
  exchange.announce();
  for (uint32_t c = 0; c < shape.chunks; ++c) {
    const Extent part = extent(c);
    const uint64_t at = part.begin * shape.element;
    state.node->reduce(in + at, sum.get() + at, part.count, reducer.get(), 0);
    exchange.ready(c);
    peers.look(exchange);
  }
  for (uint32_t c = 0; c < shape.chunks; ++c) {
    while (!finished[c]) peers.look(exchange);
    const Extent part = extent(c);
    const uint64_t at = part.begin * shape.element;
    if (aside) peers.copy(out + at, result + at, part.count * shape.element);
    state.node->broadcast(out + at, part.count * shape.element, 0);
  }
  while (!exchange.done()) peers.look(exchange);
  peers.flush();
}

}  // namespace nostall::mpi
