// plan/cluster.h - what one node keeps when the nodes of a job share what they keep.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/owners.h"
#include "plan/placement.h"

namespace nostall::plan {

// What a node keeps in the room that its owned samples leave.
enum class CopyRule : uint8_t {
  none,
  fixed,     // what it reads at least twice, most often first, for the whole job
  next_use,  // in the RAM tier what it reads again soonest, for as long as that is so
             // (plan/copies_by_use.h); in others fixed ones
};

// The accesses that decide a node's placement (plan/placement.h). The samples it owns come before
// all others, whichever node reads them, and are there from their first access by any node on. With
// CopyRule::fixed copies of what the node itself reads at least twice follow.
// `own` is the node's node_access. Pure, O(F).
NodeAccess cluster_access(const Ownership& ownership, uint32_t node, NodeAccess own,
                          CopyRule copies = CopyRule::fixed);

// Where that puts what a node of several keeps. With CopyRule::next_use nothing but owned samples lies
// in tier number `ram` for the whole job, and behind them are places for copies of others' samples that
// lie in no tier of the node; but where all copies that the node reads again have room they stay, as with
// CopyRule::fixed. Pure, O(F log F).
Placement place_cluster(std::span<const uint64_t> sizes, const Ownership& ownership, uint32_t node,
                        const NodeAccess& own, std::vector<TierShape> tiers, CopyRule copies,
                        size_t ram = 0, std::span<const std::vector<Resident>> resident = {});

// Whether a node with that placement may have a copy of the sample for a while.
inline bool is_copied(const Ownership& ownership, uint32_t node, const Placement& placement,
                      SampleId s) {
  return placement.tier[s] == kNoTier && ownership.owner[s] != node &&
         ownership.owner[s] != kNoOwner;
}

}  // namespace nostall::plan
