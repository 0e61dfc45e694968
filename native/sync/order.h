// sync/order.h - in which order gradients are reduced, and which of them together.
//
// The order follows from the graph that produces the gradients, so no rank has to ask another one
// (Horovod-TOPO [Pumma 2020, sec. 6.3.4]). Nodes run when all their parents have run; among
// those that can, the one of the highest priority first, then the least deep, then the first in the
// list. Autograd's executor does just that with its nodes' sequence numbers; with equal priorities
// it is the published rule: parents before children, siblings as they were added, others by depth.
// Tensors that follow each other are fused up to a threshold, unless one depends on another.
// Thread-safety: pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "collective/types.h"

namespace nostall::sync {

// One gradient, the same on every rank.
struct TensorSpec {
  std::string name;
  uint64_t count = 0;  // elements
  collective::DataType type = collective::DataType::float32;
  collective::DataType wire = collective::DataType::float32;  // what is sent: may be narrower
};

struct GraphNode {
  std::vector<uint32_t> parents;  // what has to run before
  int64_t tensor = -1;            // index of the gradient that is ready after it
  int64_t priority = 0;
};

// The reductions of one step: every tensor is in exactly one group.
struct ReductionPlan {
  std::vector<std::vector<uint32_t>> groups;  // tensors, in the order of their numbers (ids)
  uint64_t nodes = 0, edges = 0;              // of the graph that was walked

  uint64_t fingerprint() const noexcept;
};

// The tensors of the graph in the order in which they become ready, walked back from the nodes
// that hold them; O(V log V + E). Throws Error(usage) if the graph has a cycle or names a node or
// tensor that is not there.
std::vector<uint32_t> order_of(std::span<const GraphNode> graph, uint64_t tensors);

// Order and fusion. Tensors that the graph does not reach come last, in groups of their own.
ReductionPlan plan_reductions(std::span<const GraphNode> graph, std::span<const TensorSpec> tensors,
                              uint64_t threshold_bytes);

// Fusion of a given order of independent tensors; those not in it come last, as above.
ReductionPlan fuse(std::span<const uint32_t> order, std::span<const TensorSpec> tensors,
                   uint64_t threshold_bytes);

}  // namespace nostall::sync
