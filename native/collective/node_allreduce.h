// collective/node_allreduce.h - an allreduce between nodes by order of arrival.
//
// One rank for each node; each brings its node's sum and gets the sum of all. A message is cut into
// chunks, so that the node's own reduction before and its broadcast after overlap with this. Every
// rank owns a share of each chunk: it adds up that share of all ranks and sends the sum to all, so
// that every link carries the message once out and once in for each of the two halves.
//
// Early ranks have done their halves when the last rank arrives. What remains is the last rank's
// message out and the result in; if it owned a share too, its link would carry both halves. So late
// ranks own nothing, and their shares are divided among the owners. All ranks derive the late ones
// from the same facts: on arrival each rank announces to all others which ranks it has seen arrive.
// A rank seen by fewer than `late` others is late, unless too many arrived at the same time
// (late_ranks).
// A rank may arrive early while its node's sum is the last one to be ready, because one rank of its
// node is late. It then hands the sums of its share to the others in pieces, and each passes its
// piece on to all, for the same reason.
//
// Every message is sent exactly once, between pairs and under tags that follow from the above;
// calls on the same Messages may follow each other without a barrier.
// Thread-safety: none. No MPI, no clock and no waiting in here: `Messages` is the transport, and
// the caller's loop hands in what was received.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace nostall::collective {

// The ranks' transport: MPI's point-to-point messages, or a simulation's. Messages from one rank
// to another under one tag stay in order.
class Messages {
 public:
  virtual ~Messages() = default;
  // `data` stays as it is until the allreduce is done.
  virtual void send(uint32_t to, uint32_t tag, const void* data, uint64_t bytes) = 0;
  // What is received is handed to NodeAllreduce::received with this cookie.
  virtual void receive(uint32_t from, uint32_t tag, void* data, uint64_t bytes,
                       uint64_t cookie) = 0;
  // into += from, or into = from where `first`.
  virtual void fold(std::byte* into, const std::byte* from, uint64_t count, bool first) = 0;
  virtual void copy(std::byte* into, const std::byte* from, uint64_t bytes) = 0;
  // Memory for what is received, until the allreduce is done.
  virtual std::byte* scratch(uint64_t bytes) = 0;
  // Memory of the host for announcements, until the last message has ended.
  uint8_t* words(uint64_t bytes) { return words_.emplace_back(bytes).data(); }

 protected:
  std::deque<std::vector<uint8_t>> words_;
};

// Elements [begin, begin + count) of something.
struct Extent {
  uint64_t begin = 0, count = 0;
};
// The part-th of `parts` nearly equal parts of `count` elements.
Extent part_of(uint64_t count, uint32_t part, uint32_t parts) noexcept;

// seen[i][j]: rank i had seen j arrive when it arrived itself. Returns for each rank whether it
// is late: seen by fewer than `late` others, and at most 2 * `late` are.
std::vector<bool> late_ranks(const std::vector<std::vector<bool>>& seen, uint32_t late);

struct NodeAllreduceShape {
  uint32_t rank = 0, ranks = 1;
  uint64_t count = 0;     // elements of the message
  uint64_t element = 1;   // bytes
  uint32_t chunks = 1;    // at most 1024
  uint32_t window = 4;    // chunks under way at a time
  uint32_t late = 1;      // ranks that own nothing; 0: all own
  bool in_order = false;  // sums repeat bit for bit: added in the order of ranks
};

class NodeAllreduce {
 public:
  // `in`: this node's sum, chunk by chunk as announced by ready(). `out` gets the result; it may
  // not overlap `in`. `finished(chunk)` is called when a chunk of it is complete.
  NodeAllreduce(const NodeAllreduceShape& shape, Messages& messages, const std::byte* in,
                std::byte* out, std::function<void(uint32_t)> finished);

  // First: asks for the announcements. The caller then hands in those that are there already, by
  // received(), and calls announce().
  void listen();
  void announce();
  // The node's sum of this chunk is in `in`.
  void ready(uint32_t chunk);
  void received(uint64_t cookie, uint64_t bytes);
  // All of the result is there, and nothing is on its way to this rank any more.
  bool done() const noexcept { return finished_chunks_ == shape_.chunks && expected_ == 0; }

  Extent chunk(uint32_t index) const noexcept {
    return part_of(shape_.count, index, shape_.chunks);
  }
  const std::vector<bool>& late() const noexcept { return late_; }

 private:
  enum Kind : uint32_t { announcement, contribution, extra, share, extra_share, piece };
  // A sum that grows; in_order sums wait for their next rank.
  struct Sum {
    std::byte* into = nullptr;
    uint32_t added = 0, next = 0;
    std::vector<const std::byte*> waiting;  // by rank, in_order only
    std::vector<bool> received;
  };
  struct Chunk {
    bool open = false, expecting = false, ready = false, mine_last = false;
    std::vector<bool> sent;  // ranks that have the contribution
    std::vector<std::byte*> contributions, extras, extra_shares;
    Sum own, extra;
    uint32_t missing = 0;  // messages until the result is complete
  };

  uint32_t tag(Kind kind, uint32_t chunk, uint32_t rank = 0) const noexcept {
    return (chunk * shape_.ranks + rank) * 6 + kind;
  }
  uint64_t cookie(Kind kind, uint32_t chunk, uint32_t from, uint32_t rank = 0) const noexcept {
    return ((uint64_t{chunk} * shape_.ranks + rank) * shape_.ranks + from) * 6 + kind;
  }
  // In elements of the message.
  Extent share_of(uint32_t chunk, uint32_t rank) const noexcept;
  // The piece of a late rank's share that the owner with this place among owners adds up.
  Extent extra_of(uint32_t chunk, uint32_t late_rank, uint32_t place) const noexcept;
  Extent piece_of(uint32_t chunk, uint32_t owner, uint32_t rank) const noexcept;
  uint64_t extra_count(uint32_t chunk, uint32_t place) const noexcept;
  void gather_extra(uint32_t chunk, uint32_t place, std::byte* into);
  void scatter_extra(uint32_t chunk, uint32_t place, const std::byte* from);

  void expect(uint32_t from, Kind kind, uint32_t chunk, void* data, uint64_t bytes,
              uint32_t rank = 0) {
    ++expected_;
    messages_.receive(from, tag(kind, chunk, rank), data, bytes, cookie(kind, chunk, from, rank));
  }
  void arrived(uint32_t rank);
  void decide();
  void open(uint32_t chunk);
  void brought(uint32_t chunk);
  void expect_results(uint32_t chunk);
  void contribute(uint32_t chunk, uint32_t rank);
  void contribute_extra(uint32_t chunk);
  void add(Sum& sum, const std::byte* from, uint64_t count, uint32_t rank);
  void own_complete(uint32_t chunk);
  void extra_complete(uint32_t chunk);
  void share_came(uint32_t chunk, uint32_t from, uint64_t bytes);
  void one_less(uint32_t chunk);

  const NodeAllreduceShape shape_;
  Messages& messages_;
  const std::byte* const in_;
  std::byte* const out_;
  const std::function<void(uint32_t)> finished_;
  std::vector<std::vector<bool>> seen_;
  uint8_t* const rows_;  // as sent: a byte a rank; messages may outlast this
  std::vector<bool> present_, sendable_, late_;
  std::vector<uint32_t> owners_, place_;  // place among owners, by rank
  uint32_t present_count_ = 0, finished_chunks_ = 0, opened_ = 0;
  uint64_t expected_ = 0;  // messages asked for and not received
  bool decided_ = false;
  std::vector<Chunk> chunks_;
};

}  // namespace nostall::collective
