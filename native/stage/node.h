// stage/node.h - from a plan and the tiers that the user gave to the cache that the node's ranks
// share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plan/chunks.h"
#include "plan/cluster.h"
#include "plan/copies.h"
#include "plan/owners.h"
#include "source/source.h"
#include "tier/node_cache.h"

namespace nostall::stage {

// Which rank reads from the source what a node is to keep, and what that is.
enum class Sharing : uint8_t {
  push,         // one owner a sample; the rank that needs it first pushes it there: read once
  owners_read,  // one owner a sample, which reads it for itself ahead of need; a rank that needs it
                // before the owner has it reads it too
  hdmlp,  // HDMLP [Böhringer 2020]: each node keeps what it reads most often itself, which may
          // lie on other nodes too, and reads it ahead of need beside what its ranks read;
          // what others have is guessed from its own progress (peer/guess.h)
};

struct NodeSpec {
  std::string job;  // the same for all ranks of this job on this node, and for no other
  uint32_t local_rank = 0;
  uint32_t local_world = 1;           // ranks [rank - local_rank, + local_world) share this node
  std::vector<tier::TierSpec> tiers;  // fastest first; capacities are the node's
  uint32_t node = 0;                  // this node's number among `nodes`
  plan::Nodes nodes;                  // all that share what they keep; empty: this one is alone
  std::vector<std::vector<tier::TierSpec>> all_tiers;  // of every node, for Sharing::hdmlp
  uint64_t loads = 0;       // of states, before this start: tier::NodeCacheConfig
  bool any_member = false;  // processes that come and go: tier::NodeCacheConfig
  plan::CopyRule copies = plan::CopyRule::fixed;  // of others' samples, where those have owners
  bool locality = false;  // ranks take what they own, not what the plan deals them: plan/locality.h
  std::function<void()> waiting{};  // is called while ranks wait: tier::NodeCacheConfig
};

// This node's part of the cache.
struct NodeTiers {
  std::shared_ptr<tier::NodeCache> cache;  // null: no tier has any capacity
  plan::Ownership ownership;               // empty if this node is alone
  // Sharing::hdmlp; its `ownership` names the node that a sample is fetched from.
  plan::Copies copies;
  std::vector<std::vector<plan::SampleId>> fill;  // what each tier is filled with, in order
  plan::CopyPlaces places;                        // with CopyRule::next_use
  uint64_t plan = 0;  // fingerprint of what all nodes keep: the same on all of them
  // What is kept for each chunk of sub-batches, in halves of that shape; null: nothing is.
  std::shared_ptr<const plan::Chunks> chunks;
  plan::HalfShape half;
};

// Plans what this node keeps where (plan/placement.h, plan/cluster.h, plan/copies.h), for global
// batches from `begin` on (of a job of more than 1,024 epochs those of the next 16), and attaches. Throws what
// NodeCache::attach throws. Cost: O(F) memory, O(F * epochs) time.
NodeTiers attach_node_cache(const plan::JobSpec& job, uint32_t rank, const source::Source& source,
                            const NodeSpec& node, Sharing sharing, plan::Position begin = {});

}  // namespace nostall::stage
