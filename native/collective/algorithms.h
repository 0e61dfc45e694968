// collective/algorithms.h - the algorithms themselves, each in a file of its name.
//
// All take buffers whose sizes were checked; `in` may be `out`. Counts are in elements.
#pragma once

#include <cstdint>
#include <span>

#include "collective/communicator.h"
#include "collective/reducer.h"
#include "collective/steps.h"

namespace nostall::collective {

struct Message {
  const std::byte* in;
  std::byte* out;
  uint64_t count;
  const Reducer* reducer;  // null: bytes are moved, count is in bytes
  uint64_t element() const noexcept { return reducer ? reducer->element_bytes() : 1; }
  uint64_t bytes() const noexcept { return count * element(); }
};

// posted.cc: each rank posts its data and reads that of all others; sums are left folds in rank
// order. One step for messages that fit a stage, a step for each piece otherwise.
void posted_barrier(Steps& steps);
void posted_allreduce(Steps& steps, const Message& message);
void posted_reduce(Steps& steps, const Message& message, uint32_t root);  // one stage at most
void posted_broadcast(Steps& steps, const Message& message, uint32_t root);
// `out` gets the elements from borders[rank] to borders[rank + 1]; one stage at most, of two ranks up.
void posted_reduce_scatter(Steps& steps, const Message& message, std::span<const uint64_t> borders);
// parts[r]: where rank r's data go.
void posted_allgather(Steps& steps, const std::byte* in, std::span<const Gathered> parts);

// chain.cc: a pipeline of segments through the step's window, in order of arrival or of rank.
struct ChainShape {
  int32_t root = -1;       // the rank that gets the result; -1: all
  bool broadcast = false;  // the root's data to all others
  bool by_rank = false;    // in the order of ranks, not of arrival
  bool whole = false;      // no segments: each rank hands on all of it
  // Of the result rank r gets the elements from borders[r] to borders[r + 1]; empty: all of it.
  std::span<const uint64_t> borders{};
};
void chain(Steps& steps, const Message& message, const ChainShape& shape);
// How a message is cut for it. Segments grow where they would be more than a word counts beside its
// step; throws Error(usage) if the window holds no such segment, two at a time.
struct Segments {
  uint64_t elements;  // in each but the last
  uint64_t count;
};
inline constexpr uint64_t kSegmentBits = 24;
inline constexpr uint64_t kMostSegments = (uint64_t{1} << kSegmentBits) - 1;
inline constexpr uint64_t kSmallestSegment = 8 << 10;
// The most that is handed over and not yet used, of all ranks, once all have arrived: it stays in
// cache.
inline constexpr uint64_t kAhead = 2 << 20;
// Larger results are written past the caches, which they would leave before they are read.
inline constexpr uint64_t kStreamFrom = 16 << 20;
Segments segments_of(uint64_t count, uint64_t element, uint32_t ranks, bool whole, uint64_t window);

// shared.cc: buffers that all ranks can reach are reduced where they are, by the ranks that have
// arrived.
// The first to arrive chooses: if its buffers are shared all do this, else the chain (chain_after).
// If any rank cannot allocate in its arena, all ranks fall back to the chain, so the result does
// not depend on arrival order.
struct Arrival {
  uint64_t step;
  uint32_t place;  // 0: the first
  bool in_place;   // the first one's buffers are shared
};
Arrival arrive(Steps& steps, bool offers_in_place);
// False, on all ranks and with nothing reduced, if a rank's `in` or `out` lies in no arena.
bool shared_allreduce(Steps& steps, const Message& message, const Arrival& arrival);
void chain_after(Steps& steps, const Message& message, const ChainShape& shape,
                 const Arrival& arrival);

// A reduce_scatter of more bytes, of a rank to all, goes by the chain.
inline constexpr uint64_t kScatterFrom = 16 << 10;

// gather.cc: each rank's data through its share of the step's window, for messages of which a rank
// gives more than kGatherFrom bytes.
inline constexpr uint64_t kGatherFrom = kStageBytes;  // up to there one step serves all
bool gathers_by_arrival(const Steps& steps, uint64_t window, std::span<const Gathered> parts);
void gather_by_arrival(Steps& steps, const std::byte* in, std::span<const Gathered> parts);

// leader.cc: one rank reduces what all have copied to shared memory. Static leader: rank 0, or the
// root; otherwise the first to arrive.
void leader_allreduce(Steps& steps, const Message& message, bool by_arrival);
void leader_reduce(Steps& steps, const Message& message, uint32_t root, bool by_arrival);

// pairwise.cc: the textbook's algorithms, on messages between pairs of ranks.
void recursive_doubling_allreduce(Steps& steps, const Message& message);
void ring_allreduce(Steps& steps, const Message& message);
void rsa_allreduce(Steps& steps, const Message& message);
void binomial_reduce(Steps& steps, const Message& message, uint32_t root);
void binomial_broadcast(Steps& steps, const Message& message, uint32_t root);

}  // namespace nostall::collective
