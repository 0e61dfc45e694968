// plan/owners.h - which node keeps which sample, when nodes share what they keep.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace nostall::plan {

inline constexpr uint32_t kNoOwner = ~uint32_t{0};

// An owner for every sample: the node that reads it most often, ties to the node that reads it
// first; where that node is full, the next best one with room, then any node with room, so that no
// sample stays without an owner while a node has room for it, and none has two. Samples are served
// in order of their highest frequency, then of their first access. `capacities`: bytes, one per
// node; node i holds the ranks [i * ranks_per_node, (i + 1) * ranks_per_node). Cost: O(F) memory
// beside one epoch's order, O(F * epochs) time. Throws Error(usage) if the nodes do not make up the
// world.
std::vector<uint32_t> owners(const JobSpec& spec, std::span<const uint64_t> sizes,
                             std::span<const uint64_t> capacities, uint32_t ranks_per_node);

}  // namespace nostall::plan
