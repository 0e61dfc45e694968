// collective/two_level.h - an allreduce over several nodes: each node reduces to its local leader,
// the leaders allreduce among each other, each leader broadcasts in its node.
//
// The message is cut into parts. A leader hands over each part as soon as its node has reduced it,
// so that the leaders' work on one part overlaps with the node's work on the next ones:
//
//   node, reduce       0 1 2 3
//   leaders              0 1 2 3
//   node, broadcast            0 1 2 3
//
// The allreduce between leaders is an interface (Leaders). An MPI's allreduce implements it,
// collective::NodeAllreduce over messages, torch's Gloo, and a test's.
//
// Order of sums: first within each node, by arrival or, with Order::fixed, in the order of local
// ranks; then over nodes in the leaders' own order. So the last bits of floats may
// differ from those of an allreduce over all ranks at once. The result is the same on all ranks if the
// leaders' results are the same.
//
// Errors: what a leader throws ends its node's communicator, so that the other ranks of the node,
// which wait for the leader, throw its text.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/communicator.h"
#include "collective/node_allreduce.h"
#include "collective/reducer.h"

namespace nostall::collective {

// One rank's side of an allreduce; the same on all ranks but for the addresses.
struct TwoLevelMessage {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;  // may be `in`
  uint64_t count = 0;
  const Reducer* reducer = nullptr;  // commutative
  uint32_t parts = 1;

  Extent part(uint32_t index) const noexcept { return part_of(count, index, parts); }
  uint64_t offset(uint64_t element) const noexcept { return element * reducer->element_bytes(); }
};

// Parts of about `part_bytes`, at most `most`; at least 1.
uint32_t parts_of(uint64_t bytes, uint64_t part_bytes, uint32_t most) noexcept;

// The allreduce among the local leaders. Calls: begin, start of each part, finish of each part, end;
// none after one that throws. The same sequence on all leaders.
class Leaders {
 public:
  virtual ~Leaders() = default;
  // Returns where the node's sums go: the message's `out`, or other memory of its size.
  virtual std::byte* begin(const TwoLevelMessage& message) = 0;
  // The node's sum of this part is there.
  virtual void start(uint32_t part) = 0;
  // Returns when `out` has the sum of this part over all nodes.
  virtual void finish(uint32_t part) = 0;
  // Returns when nothing that was started still uses the message's memory.
  virtual void end() {}
};

// All ranks call this. `leaders` is null on all ranks but the node's rank 0.
void two_level_allreduce(Communicator& node, Leaders* leaders, const TwoLevelMessage& message,
                         const CallOptions& options = {});

}  // namespace nostall::collective
