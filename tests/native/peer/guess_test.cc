// The guess of what another node has, from this node's own progress.
#include "peer/guess.h"

#include "nodes.h"

namespace nostall::peer {
namespace {

class GuessTest : public Nodes {
 protected:
  // The other node has samples 0, 1, 2, ... in tier 0, in this order; 23 in tier 1; 22 nowhere.
  static plan::Copies copies() {
    plan::Copies copies;
    for (uint32_t s = 0; s < kSamples; ++s) {
      copies.node.push_back(s == 22 ? plan::kNoOwner : 1);
      copies.tier.push_back(s == 23 ? 1 : 0);
      copies.place.push_back(s == 23 ? 0 : s);
    }
    return copies;
  }
};

TEST_F(GuessTest, FollowsTheOwnTierOfTheSameIndex) {
  const auto cache = cache_of(0, tier::TierKind::ram);
  std::vector<plan::SampleId> own;
  for (uint64_t s = 0; s < kSamples; ++s) {
    if (cache->placed(s)) own.push_back(s);
  }
  ASSERT_GT(own.size(), kGuessAhead + 2);
  Guess guess(copies(), {own}, cache);
  EXPECT_TRUE(guess.there(23)) << "this node has no tier 1";
  EXPECT_FALSE(guess.there(0));
  for (size_t i = 0; i <= kGuessAhead; ++i) put(*cache, own[i]);
  EXPECT_TRUE(guess.there(0)) << "this node is that far ahead";
  EXPECT_FALSE(guess.there(1));
  for (size_t i = kGuessAhead + 1; i < own.size(); ++i) put(*cache, own[i]);
  EXPECT_TRUE(guess.there(21)) << "this node has filled its tier";
  EXPECT_FALSE(guess.there(22));
}

}  // namespace
}  // namespace nostall::peer
