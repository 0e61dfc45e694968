// plan/owners.h - which node keeps which sample, when nodes share what they keep.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace nostall::plan {

inline constexpr uint32_t kNoOwner = ~uint32_t{0};

// The nodes of a job: which one each rank is on, and what each can keep.
struct Nodes {
  std::vector<uint32_t> of_rank;   // spec.world entries
  std::vector<uint64_t> capacity;  // bytes, one per node
};
// Consecutive ranks on each node, as launchers place them. Throws Error(usage) if the nodes do not
// make up the world.
Nodes equal_nodes(const JobSpec& spec, std::vector<uint64_t> capacity, uint32_t ranks_per_node);

struct Ownership {
  std::vector<uint32_t> owner;         // per sample: its node, or kNoOwner
  std::vector<uint32_t> first_reader;  // per sample: the node of its first access, or kNoOwner
  std::vector<uint64_t> first_access;  // per sample: time of its first access by any node, kNever
};

// Of a job: from `first` on, without `end`.
struct Epochs {
  uint32_t first = 0, end = 0;
};

// An owner for every sample: the node that reads it most often, ties to the node that reads it
// first; where that node is full, the next best one with room, then any node with room, so that no
// sample stays without an owner while a node has room for it, and none has two. Samples are served
// in order of their highest frequency, then of their first access. `sizes`: bytes that a sample
// takes of a node's capacity. First accesses and readers are those of global batches from `begin`
// on, in the time of node_access (plan/placement.h); owners follow from the epochs `of`, or all, so
// that a job that resumes finds what its nodes kept. Cost for E such epochs: O(F * E)
// time, and F * E bytes (twice as many beyond 256 nodes) beside one epoch's order. Throws Error(usage)
// if `nodes` does not go with the world, or the job has no epoch that is asked for.
Ownership owners(const JobSpec& spec, std::span<const uint64_t> sizes, const Nodes& nodes,
                 Position begin = {}, std::optional<Epochs> of = std::nullopt);

}  // namespace nostall::plan
