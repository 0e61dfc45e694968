// plan/cluster.h - what one node keeps when the nodes of a job share what they keep.
#pragma once

#include "plan/owners.h"
#include "plan/placement.h"

namespace nostall::plan {

// The accesses that decide a node's placement (plan/placement.h). The samples it owns come before
// all others, whichever node reads them, and are there from their first access by any node on. The
// room they leave holds copies of what the node itself reads at least twice, most often first.
// `own` is the node's node_access. Pure, O(F).
NodeAccess cluster_access(const Ownership& ownership, uint32_t node, NodeAccess own);

}  // namespace nostall::plan
