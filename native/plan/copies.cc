// Places the samples of one node after the other, and keeps the best copy of each.
#include "plan/copies.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "base/error.h"

namespace nostall::plan {

Copies copies_of_others(const JobSpec& spec, std::span<const uint64_t> sizes, const Nodes& nodes,
                        std::span<const std::vector<TierShape>> tiers, uint32_t node,
                        Position begin) {
  if (nodes.of_rank.size() != spec.world || sizes.size() != spec.samples ||
      std::any_of(nodes.of_rank.begin(), nodes.of_rank.end(),
                  [&](uint32_t of) { return of >= tiers.size(); })) {
    throw Error(ErrorKind::usage, "tiers of " + std::to_string(tiers.size()) +
                                      " nodes do not go with " +
                                      std::to_string(nodes.of_rank.size()) +
                                      " ranks of a world of " + std::to_string(spec.world));
  }
  Copies best;
  best.node.assign(sizes.size(), kNoOwner);
  best.tier.assign(sizes.size(), kNoTier);
  best.place.assign(sizes.size(), ~uint32_t{0});
  for (uint32_t other = 0; other < tiers.size(); ++other) {
    const auto first = std::find(nodes.of_rank.begin(), nodes.of_rank.end(), other);
    if (other == node || first == nodes.of_rank.end()) continue;
    const auto ranks = std::count(first, nodes.of_rank.end(), other);
    const NodeAccess access =
        node_access(spec, static_cast<uint32_t>(first - nodes.of_rank.begin()),
                    static_cast<uint32_t>(ranks), begin);
    const Placement placed = place(sizes, access, tiers[other]);
    for (size_t t = 0; t < placed.fill.size(); ++t) {
      for (uint32_t i = 0; i < placed.fill[t].size(); ++i) {
        const SampleId s = placed.fill[t][i];
        const auto tier = static_cast<uint8_t>(t);
        if (std::tuple(tier, i) < std::tuple(best.tier[s], best.place[s])) {
          best.node[s] = other;
          best.tier[s] = tier;
          best.place[s] = i;
        }
      }
    }
  }
  return best;
}

}  // namespace nostall::plan
