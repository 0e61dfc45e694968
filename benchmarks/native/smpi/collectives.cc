// Allreduces on simulated ranks: by order of arrival, by halving and doubling, and in two levels.
#include <algorithm>
#include <deque>
#include <vector>

#include "simulated.h"

namespace nostall::simulated {
namespace {

using collective::Extent;
using collective::part_of;

constexpr uint64_t kOfNode = uint64_t{1} << 63;  // cookies of messages within the node

class LaneMessages final : public collective::Messages {
 public:
  LaneMessages(MPI_Comm lane, Mailroom& mailroom) : lane_(lane), mailroom_(mailroom) {}
  void send(uint32_t to, uint32_t tag, const void* data, uint64_t bytes) override {
    mailroom_.send(lane_, to, tag, data, bytes, true);
  }
  void receive(uint32_t from, uint32_t tag, void* data, uint64_t bytes, uint64_t cookie) override {
    mailroom_.receive(lane_, from, tag, data, bytes, cookie);
  }
  void fold(std::byte* into, const std::byte* from, uint64_t count, bool first) override {
    auto* const sum = reinterpret_cast<float*>(into);
    add_up(sum, first ? nullptr : sum, reinterpret_cast<const float*>(from), count);
  }
  void copy(std::byte* into, const std::byte* from, uint64_t bytes) override {
    add_up(reinterpret_cast<float*>(into), nullptr, reinterpret_cast<const float*>(from),
           bytes / sizeof(float));
  }
  std::byte* scratch(uint64_t bytes) override { return memory_.emplace_back(bytes).get(); }

 private:
  MPI_Comm lane_;
  Mailroom& mailroom_;
  std::deque<Memory> memory_;
};

// Of every chunk each of the node's ranks adds up one part and takes part in the allreduce of that
// part between nodes.
class Ours {
 public:
  Ours(const Place& place, const float* in, float* out, uint64_t count, const Tuning& tuning)
      : place_(place),
        in_(in),
        out_(out),
        count_(count),
        chunks_(chunks_of(count, tuning)),
        lane_count_(lane_offset(chunks_)),
        sum_(lane_count_ * sizeof(float)),
        messages_(place.lane, mailroom_),
        between_(shape(tuning), messages_, sum_.get(),
                 reinterpret_cast<std::byte*>(out + part(0, place.local()).begin),
                 [this](uint32_t chunk) { finished(chunk); }),
        added_(chunks_, 0) {}

  void run() {
    const auto handler = [this](uint64_t cookie, uint64_t bytes) { came(cookie, bytes); };
    between_.listen();
    mailroom_.look(handler);
    between_.announce();
    const int me = place_.local();
    for (uint32_t c = 0; c < chunks_; ++c) {
      for (int other = 0; other < place_.per_node; ++other) {
        if (other == me) continue;
        const Extent mine = part(c, me), its = part(c, other);
        theirs_.emplace_back(mine.count * sizeof(float));
        mailroom_.receive(place_.node, static_cast<uint32_t>(other), 2 * c, theirs_.back().get(),
                          mine.count * sizeof(float), kOfNode | index(c, other, 0));
        mailroom_.receive(place_.node, static_cast<uint32_t>(other), 2 * c + 1, out_ + its.begin,
                          its.count * sizeof(float), kOfNode | index(c, other, 1));
        expected_ += 2;
      }
    }
    // The first chunks first, and of each the part of the next rank first.
    for (uint32_t c = 0; c < chunks_; ++c) {
      for (int i = 1; i < place_.per_node; ++i) {
        const int other = (me + i) % place_.per_node;
        const Extent its = part(c, other);
        mailroom_.send(place_.node, static_cast<uint32_t>(other), 2 * c, in_ + its.begin,
                       its.count * sizeof(float), false);
      }
    }
    for (uint32_t c = 0; place_.per_node == 1 && c < chunks_; ++c) {
      add_up(sum() + lane_offset(c), nullptr, in_ + part(c, 0).begin, part(c, 0).count);
      between_.ready(c);
    }
    while (expected_ > 0 || !between_.done()) mailroom_.wait(handler);
    mailroom_.flush();
  }

 private:
  static uint32_t chunks_of(uint64_t count, const Tuning& tuning) {
    const uint64_t bytes = count * sizeof(float);
    return static_cast<uint32_t>(
        std::clamp<uint64_t>(bytes / std::max<uint64_t>(tuning.chunk, 1), 1, tuning.chunks));
  }
  collective::NodeAllreduceShape shape(const Tuning& tuning) const {
    collective::NodeAllreduceShape shape;
    shape.rank = static_cast<uint32_t>(place_.node_index());
    shape.ranks = static_cast<uint32_t>(place_.nodes());
    shape.count = lane_count_;
    shape.element = sizeof(float);
    shape.chunks = chunks_;
    shape.late = tuning.late;
    return shape;
  }
  // The part of a chunk that belongs to this local rank; the exchange's message is all of these.
  Extent part(uint32_t chunk, int local) const {
    const Extent lane =
        part_of(count_, static_cast<uint32_t>(local), static_cast<uint32_t>(place_.per_node));
    const Extent mine = part_of(lane.count, chunk, chunks_);
    return {lane.begin + mine.begin, mine.count};
  }
  uint64_t lane_offset(uint32_t chunk) const {
    if (chunk == chunks_) {
      return part_of(count_, static_cast<uint32_t>(place_.local()),
                     static_cast<uint32_t>(place_.per_node))
          .count;
    }
    return part(chunk, place_.local()).begin - part(0, place_.local()).begin;
  }
  uint64_t index(uint32_t chunk, int other, uint64_t kind) const {
    return (uint64_t{chunk} * static_cast<uint64_t>(place_.per_node) +
            static_cast<uint64_t>(other)) *
               2 +
           kind;
  }
  float* sum() const { return reinterpret_cast<float*>(sum_.get()); }

  void add(uint32_t chunk, const float* from) {
    const Extent mine = part(chunk, place_.local());
    float* const sum = this->sum() + lane_offset(chunk);
    add_up(sum, added_[chunk] == 0 ? in_ + mine.begin : sum, from, mine.count);
    if (++added_[chunk] == place_.per_node - 1) between_.ready(chunk);
  }

  void came(uint64_t cookie, uint64_t bytes) {
    if ((cookie & kOfNode) == 0) return between_.received(cookie, bytes);
    --expected_;
    const uint64_t at = cookie & ~kOfNode;
    if (at % 2 == 1) return;  // a part of the result, where it belongs
    const auto other = static_cast<int>(at / 2 % static_cast<uint64_t>(place_.per_node));
    const auto chunk = static_cast<uint32_t>(at / 2 / static_cast<uint64_t>(place_.per_node));
    const int place = other < place_.local() ? other : other - 1;
    const size_t which =
        size_t{chunk} * static_cast<size_t>(place_.per_node - 1) + static_cast<size_t>(place);
    add(chunk, reinterpret_cast<const float*>(theirs_[which].get()));
  }

  void finished(uint32_t chunk) {
    const Extent mine = part(chunk, place_.local());
    for (int i = 1; i < place_.per_node; ++i) {
      const int other = (place_.local() + i) % place_.per_node;
      mailroom_.send(place_.node, static_cast<uint32_t>(other), 2 * chunk + 1, out_ + mine.begin,
                     mine.count * sizeof(float), false);
    }
  }

  const Place& place_;
  const float* const in_;
  float* const out_;
  const uint64_t count_;
  const uint32_t chunks_;
  const uint64_t lane_count_;
  Memory sum_;
  Mailroom mailroom_;
  LaneMessages messages_;
  collective::NodeAllreduce between_;
  std::vector<int> added_;
  std::deque<Memory> theirs_;
  uint64_t expected_ = 0;
};

// A few bytes: the node's first rank adds them, recursive doubling among those, and back.
void small_allreduce(const Place& place, float* data, uint64_t count) {
  const auto bytes = static_cast<int>(count * sizeof(float));
  constexpr int kIn = 30000, kOut = 30001, kBetween = 30002;
  const int me = place.local();
  if (me != 0) {
    MPI_Send(data, bytes, MPI_BYTE, 0, kIn, place.node);
    MPI_Recv(data, bytes, MPI_BYTE, 0, kOut, place.node, MPI_STATUS_IGNORE);
    return;
  }
  const Memory other(count * sizeof(float));
  auto* const theirs = reinterpret_cast<float*>(other.get());
  for (int i = 1; i < place.per_node; ++i) {
    MPI_Recv(theirs, bytes, MPI_BYTE, MPI_ANY_SOURCE, kIn, place.node, MPI_STATUS_IGNORE);
    add_up(data, data, theirs, count);
  }
  const int node = place.node_index(), nodes = place.nodes();
  int power = 1;
  while (2 * power <= nodes) power *= 2;
  if (node >= power) {
    MPI_Send(data, bytes, MPI_BYTE, node - power, kBetween, place.lane);
    MPI_Recv(data, bytes, MPI_BYTE, node - power, kBetween, place.lane, MPI_STATUS_IGNORE);
  } else {
    const bool folds = node + power < nodes;
    if (folds) {
      MPI_Recv(theirs, bytes, MPI_BYTE, node + power, kBetween, place.lane, MPI_STATUS_IGNORE);
      add_up(data, data, theirs, count);
    }
    for (int distance = 1; distance < power; distance *= 2) {
      const int peer = node ^ distance;
      MPI_Sendrecv(data, bytes, MPI_BYTE, peer, kBetween, theirs, bytes, MPI_BYTE, peer, kBetween,
                   place.lane, MPI_STATUS_IGNORE);
      add_up(data, data, theirs, count);
    }
    if (folds) MPI_Send(data, bytes, MPI_BYTE, node + power, kBetween, place.lane);
  }
  for (int i = 1; i < place.per_node; ++i) {
    MPI_Send(data, bytes, MPI_BYTE, i, kOut, place.node);
  }
}

// Each rank of a node adds up a part, the ranks of that part halve and double it between the nodes
// (Rabenseifner's algorithm), and the node's ranks hand each other the results.
class Halving {
 public:
  Halving(const Place& place, const float* in, float* out, uint64_t count)
      : place_(place), out_(out), count_(count), mine_(part(place.local())) {
    const auto others = static_cast<size_t>(place.per_node - 1);
    const Memory theirs(std::max<uint64_t>(others * mine_.count * sizeof(float), 1));
    auto* const came = reinterpret_cast<float*>(theirs.get());
    std::vector<MPI_Request> sent(others), received(others);
    for (size_t i = 0; i < others; ++i) {
      const int other = (place.local() + 1 + static_cast<int>(i)) % place.per_node;
      const Extent its = part(other);
      MPI_Irecv(came + i * mine_.count, bytes(mine_.count), MPI_BYTE, other, kIn, place.node,
                &received[i]);
      MPI_Isend(in + its.begin, bytes(its.count), MPI_BYTE, other, kIn, place.node, &sent[i]);
    }
    add_up(sum(0), nullptr, in + mine_.begin, mine_.count);
    for (size_t i = 0; i < others; ++i) {
      int which = 0;
      MPI_Waitany(static_cast<int>(others), received.data(), &which, MPI_STATUS_IGNORE);
      add_up(sum(0), sum(0), came + static_cast<size_t>(which) * mine_.count, mine_.count);
    }
    MPI_Waitall(static_cast<int>(others), sent.data(), MPI_STATUSES_IGNORE);
  }

  void run() {
    const int nodes = place_.nodes(), me = place_.node_index();
    int power = 1;
    while (2 * power <= nodes) power *= 2;
    const Memory scratch(std::max<uint64_t>(mine_.count * sizeof(float), 1));
    auto* const came = reinterpret_cast<float*>(scratch.get());
    const int partner = me < power ? me + power : me - power;
    const bool folds = me < power ? partner < nodes : true;
    if (me >= power) {
      MPI_Send(sum(0), bytes(mine_.count), MPI_BYTE, partner, kIn, place_.lane);
      MPI_Recv(sum(0), bytes(mine_.count), MPI_BYTE, partner, kOut, place_.lane, MPI_STATUS_IGNORE);
    } else {
      if (folds) {
        MPI_Recv(came, bytes(mine_.count), MPI_BYTE, partner, kIn, place_.lane, MPI_STATUS_IGNORE);
        add_up(sum(0), sum(0), came, mine_.count);
      }
      halve_and_double(power, me, came);
      if (folds) MPI_Send(sum(0), bytes(mine_.count), MPI_BYTE, partner, kOut, place_.lane);
    }
    hand_out();
  }

 private:
  static constexpr int kIn = 30000, kOut = 30001, kHalf = 30002, kDouble = 30003, kResult = 30004;
  static int bytes(uint64_t count) { return static_cast<int>(count * sizeof(float)); }
  Extent part(int local) const {
    return part_of(count_, static_cast<uint32_t>(local), static_cast<uint32_t>(place_.per_node));
  }
  float* sum(uint64_t at) const { return out_ + mine_.begin + at; }

  void halve_and_double(int power, int me, float* came) {
    struct Step {
      int peer;
      Extent kept, given;
    };
    std::vector<Step> steps;
    Extent have{0, mine_.count};
    for (int distance = power / 2; distance > 0; distance /= 2) {
      const Extent low{have.begin, have.count / 2};
      const Extent high{have.begin + low.count, have.count - low.count};
      const bool upper = (me & distance) != 0;
      const Step step{me ^ distance, upper ? high : low, upper ? low : high};
      MPI_Sendrecv(sum(step.given.begin), bytes(step.given.count), MPI_BYTE, step.peer, kHalf, came,
                   bytes(step.kept.count), MPI_BYTE, step.peer, kHalf, place_.lane,
                   MPI_STATUS_IGNORE);
      add_up(sum(step.kept.begin), sum(step.kept.begin), came, step.kept.count);
      have = step.kept;
      steps.push_back(step);
    }
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      MPI_Sendrecv(sum(step->kept.begin), bytes(step->kept.count), MPI_BYTE, step->peer, kDouble,
                   sum(step->given.begin), bytes(step->given.count), MPI_BYTE, step->peer, kDouble,
                   place_.lane, MPI_STATUS_IGNORE);
    }
  }

  void hand_out() {
    std::vector<MPI_Request> all;
    for (int i = 1; i < place_.per_node; ++i) {
      const int to = (place_.local() + i) % place_.per_node;
      const int from = (place_.local() + place_.per_node - i) % place_.per_node;
      const Extent its = part(from);
      all.emplace_back();
      MPI_Irecv(out_ + its.begin, bytes(its.count), MPI_BYTE, from, kResult, place_.node,
                &all.back());
      all.emplace_back();
      MPI_Isend(sum(0), bytes(mine_.count), MPI_BYTE, to, kResult, place_.node, &all.back());
    }
    MPI_Waitall(static_cast<int>(all.size()), all.data(), MPI_STATUSES_IGNORE);
  }

  const Place& place_;
  float* const out_;
  const uint64_t count_;
  const Extent mine_;
};

bool is_small_for(int nodes, uint64_t bytes, const Tuning& tuning) {
  constexpr int kFew = 8;
  return nodes > kFew && bytes < tuning.direct * static_cast<uint64_t>(nodes - kFew);
}

}  // namespace

void ours_allreduce(const Place& place, const float* in, float* out, uint64_t count,
                    const Tuning& tuning) {
  if (count * sizeof(float) <= tuning.small) {
    add_up(out, nullptr, in, count);
    small_allreduce(place, out, count);
  } else if (is_small_for(place.nodes(), count * sizeof(float), tuning)) {
    Halving(place, in, out, count).run();
  } else {
    Ours(place, in, out, count, tuning).run();
  }
}

void hierarchical_allreduce(const Place& place, const float* in, float* out, uint64_t count,
                            MPI_Op op) {
  const auto n = static_cast<int>(count);
  MPI_Reduce(in, out, n, MPI_FLOAT, op, 0, place.node);
  if (place.local() == 0) MPI_Allreduce(MPI_IN_PLACE, out, n, MPI_FLOAT, op, place.lane);
  MPI_Bcast(out, n, MPI_FLOAT, 0, place.node);
}

}  // namespace nostall::simulated
