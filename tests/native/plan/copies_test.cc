// What other nodes keep by their own frequencies, and the guess whether they have it already.
#include "plan/copies.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"

namespace nostall::plan {
namespace {

JobSpec job(uint32_t world) {
  JobSpec spec;
  spec.samples = 60;
  spec.global_batch = 12;
  spec.world = world;
  spec.order_world = world;
  spec.epochs = 5;
  spec.seed = 3;
  return spec;
}

TEST(Copies, AreTheBestOfWhatEachOtherNodePlaces) {
  const JobSpec spec = job(3);
  const std::vector<uint64_t> sizes(spec.samples, 10);
  Nodes nodes;
  nodes.of_rank = {0, 1, 2};
  const std::vector<std::vector<TierShape>> tiers{
      {{200, 0}, {200, 0}}, {{100, 0}, {300, 0}}, {{150, 0}}};
  for (const uint32_t node : {0U, 1U, 2U}) {
    const Copies copies = copies_of_others(spec, sizes, nodes, tiers, node);
    std::vector<Placement> placed;
    for (const uint32_t other : {0U, 1U, 2U}) {
      placed.push_back(place(sizes, node_access(spec, other, 1), tiers[other]));
    }
    size_t several = 0;
    for (SampleId s = 0; s < spec.samples; ++s) {
      size_t kept = 0;
      bool found = false;
      for (const uint32_t other : {0U, 1U, 2U}) {
        const uint8_t tier = placed[other].tier[s];
        if (other == node || tier == kNoTier) continue;
        ++kept;
        const std::vector<SampleId>& fill = placed[other].fill[tier];
        const auto at = std::find(fill.begin(), fill.end(), s) - fill.begin();
        EXPECT_LE(std::pair(copies.tier[s], copies.place[s]),
                  std::pair(tier, static_cast<uint32_t>(at)));
        found = found || (copies.node[s] == other && copies.tier[s] == tier &&
                          copies.place[s] == static_cast<uint32_t>(at));
      }
      several += kept > 1 ? 1 : 0;
      EXPECT_EQ(found, kept > 0) << s;
      if (kept == 0) {
        EXPECT_EQ(copies.node[s], kNoOwner);
      }
    }
    if (node == 2) {
      EXPECT_GT(several, 0U);  // the rule keeps samples more than once
    }
  }
}

TEST(Copies, TiersOfFewerNodesThanRanksNameAreRefused) {
  const JobSpec spec = job(2);
  const std::vector<uint64_t> sizes(spec.samples, 10);
  Nodes nodes;
  nodes.of_rank = {0, 1};
  const std::vector<std::vector<TierShape>> tiers{{{100, 0}}};
  EXPECT_THROW(copies_of_others(spec, sizes, nodes, tiers, 0), Error);
}

}  // namespace
}  // namespace nostall::plan
