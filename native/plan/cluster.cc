// Turns ownership into access frequencies, so that place() can stay one rule: an owned sample gets
// a frequency above all others, and a sample of another node that is not copied gets none.
#include "plan/cluster.h"

#include <algorithm>

namespace nostall::plan {

NodeAccess cluster_access(const Ownership& ownership, uint32_t node, NodeAccess own,
                          CopyRule copies) {
  const uint32_t above_all = 1 + *std::max_element(own.frequency.begin(), own.frequency.end());
  for (SampleId s = 0; s < own.frequency.size(); ++s) {
    if (ownership.owner[s] == node) {
      own.frequency[s] += above_all;
      own.first_access[s] = ownership.first_access[s];
    } else if (ownership.owner[s] != kNoOwner &&
               (copies != CopyRule::fixed || own.frequency[s] < 2)) {
      own.frequency[s] = 0;  // not copied, or never read again
    }
  }
  return own;
}

Placement place_cluster(std::span<const uint64_t> sizes, const Ownership& ownership, uint32_t node,
                        const NodeAccess& own, std::vector<TierShape> tiers, CopyRule copies,
                        size_t ram, std::span<const std::vector<Resident>> resident) {
  bool come_and_go = copies == CopyRule::next_use && ram < tiers.size();
  uint64_t room = 0;
  if (come_and_go) {
    const Placement owned =
        place(sizes, cluster_access(ownership, node, own, CopyRule::none), tiers, resident);
    room = tiers[ram].capacity - owned.used[ram];
    uint64_t again = 0;
    for (SampleId s = 0; s < sizes.size(); ++s) {
      if (own.frequency[s] > 1 && is_copied(ownership, node, owned, s)) again += sizes[s];
    }
    come_and_go = !own.whole || again > room;
    if (come_and_go) tiers[ram].capacity = owned.used[ram];
  }
  const CopyRule rule = copies == CopyRule::none ? copies : CopyRule::fixed;
  Placement placed = place(sizes, cluster_access(ownership, node, own, rule), tiers, resident);
  if (come_and_go) {
    const auto copied = [&](SampleId s) { return is_copied(ownership, node, placed, s); };
    placed.copies = CopyPlaces(sizes, copied, room);
    placed.copy_tier = ram;
  }
  return placed;
}

}  // namespace nostall::plan
