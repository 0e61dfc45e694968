// stage/node.h - from a plan and the tiers that the user gave to the cache that the node's ranks
// share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "source/source.h"
#include "tier/node_cache.h"

namespace nostall::stage {

struct NodeSpec {
  std::string job;  // the same for all ranks of this job on this node, and for no other
  uint32_t local_rank = 0;
  uint32_t local_world = 1;           // ranks [rank - local_rank, + local_world) share this node
  std::vector<tier::TierSpec> tiers;  // fastest first; capacities are the node's
};

// Plans what this node keeps where (plan/placement.h), for epochs from `first_epoch` on, and
// attaches. Null if there are no tiers with any capacity. Throws what NodeCache::attach throws.
// Cost: O(F) memory, O(F * epochs) time.
std::shared_ptr<tier::NodeCache> attach_node_cache(const plan::JobSpec& job, uint32_t rank,
                                                   const source::Source& source,
                                                   const NodeSpec& node, uint32_t first_epoch = 0);

}  // namespace nostall::stage
