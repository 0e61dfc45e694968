#include "stage/node.h"

#include <algorithm>

#include "plan/cluster.h"

namespace nostall::stage {
namespace {

// FNV-1a.
uint64_t mix(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3u;
  return hash;
}

}  // namespace

NodeTiers attach_node_cache(const plan::JobSpec& job, uint32_t rank, const source::Source& source,
                            const NodeSpec& node, uint32_t first_epoch) {
  if (node.local_world == 0 || node.local_rank >= node.local_world || node.local_rank > rank) {
    throw Error(ErrorKind::usage, "local rank " + std::to_string(node.local_rank) + " of " +
                                      std::to_string(node.local_world) + " does not go with rank " +
                                      std::to_string(rank) +
                                      ": ranks of a node must be numbered consecutively");
  }
  std::vector<plan::TierShape> shapes;
  bool any = false;
  for (const tier::TierSpec& spec : node.tiers) {
    shapes.push_back({spec.capacity, tier::record_overhead(spec.kind)});
    any = any || spec.capacity > 0;
  }
  if (!any || source.size() == 0) return {};

  const uint32_t first_rank = rank - node.local_rank;
  const uint32_t ranks = std::min(node.local_world, job.world - first_rank);
  plan::NodeAccess access = plan::node_access(job, first_rank, ranks, first_epoch);
  NodeTiers attached;
  if (!node.nodes.capacity.empty()) {
    for (uint32_t r = 0; r < node.nodes.of_rank.size(); ++r) {
      if ((node.nodes.of_rank[r] == node.node) != (r >= first_rank && r < first_rank + ranks)) {
        throw Error(ErrorKind::usage, "rank " + std::to_string(r) +
                                          " breaks the row of ranks of node " +
                                          std::to_string(node.nodes.of_rank[r]) +
                                          ": ranks of a node must be numbered consecutively");
      }
    }
    // What a record takes differs a little between kinds of tier; the owner must have room in any.
    std::vector<uint64_t> records(source.sizes().begin(), source.sizes().end());
    for (uint64_t& bytes : records) bytes += tier::record_overhead(tier::TierKind::file);
    attached.ownership = plan::owners(job, records, node.nodes, first_epoch);
    access = plan::cluster_access(job, attached.ownership, node.node, std::move(access));
    attached.plan = mix(plan::fingerprint(job), first_epoch);
    for (const uint32_t of : node.nodes.of_rank) attached.plan = mix(attached.plan, of);
    for (const uint64_t capacity : node.nodes.capacity) {
      attached.plan = mix(attached.plan, capacity);
    }
    attached.plan = mix(attached.plan, source.fingerprint());
  }
  tier::NodeCacheConfig config;
  config.job = node.job;
  config.local_rank = node.local_rank;
  config.local_world = node.local_world;
  config.dataset = source.fingerprint();
  config.plan = mix(plan::fingerprint(job), first_epoch);
  config.tiers = node.tiers;
  attached.cache = tier::NodeCache::attach(
      config, source.sizes(), [&](std::span<const std::vector<plan::Resident>> kept) {
        return plan::place(source.sizes(), access, shapes, kept);
      });
  return attached;
}

}  // namespace nostall::stage
