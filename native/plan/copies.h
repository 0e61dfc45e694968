// plan/copies.h - what the other nodes keep when each fills its tiers by its own frequencies, the
// rule of HDMLP [Böhringer 2020, sec. 3.2.2]: a sample may lie on several nodes, or on none.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/owners.h"
#include "plan/placement.h"

namespace nostall::plan {

// Where a node finds each sample on another one: in the tier of the lowest index that any other
// node keeps it in; of these where the fewest samples are fetched before it; of these the first
// node [Böhringer 2020, sec. 4.3.6].
struct Copies {
  std::vector<uint32_t> node;   // per sample: the node, or kNoOwner
  std::vector<uint8_t> tier;    // per sample: the tier's index there, or kNoTier
  std::vector<uint32_t> place;  // per sample: how many samples that tier is filled with before it
};

// `tiers` has the shapes of every node's tiers, `nodes.of_rank` the node of every rank, whose ranks
// are consecutive. Pure. Cost: O(F) memory, O(nodes * F * epochs) time.
Copies copies_of_others(const JobSpec& spec, std::span<const uint64_t> sizes, const Nodes& nodes,
                        std::span<const std::vector<TierShape>> tiers, uint32_t node,
                        Position begin = {});

}  // namespace nostall::plan
