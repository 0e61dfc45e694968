// Bandwidth shared max-min fair between flows.
#include "simulate/share.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/random.h"

namespace nostall::simulate {
namespace {

TEST(Sharing, DividesOneResourceEqually) {
  std::vector<Flow> flows(3);
  for (Flow& f : flows) f = {1000, {{0, 1.0}}};
  flows[2].cap = 10;  // wants less than its share
  const std::vector<double> capacity = {100};
  Sharing().share(flows, capacity);
  EXPECT_NEAR(flows[0].rate, 45, 1e-9);
  EXPECT_NEAR(flows[1].rate, 45, 1e-9);
  EXPECT_NEAR(flows[2].rate, 10, 1e-9);
}

TEST(Sharing, LeavesIdleFlowsAlone) {
  std::vector<Flow> flows(2);
  flows[0] = {1000, {{0, 0.5}}};
  flows[1] = {0, {{0, 1.0}}};
  const std::vector<double> capacity = {100};
  Sharing().share(flows, capacity);
  EXPECT_NEAR(flows[0].rate, 200, 1e-9);
  EXPECT_EQ(flows[1].rate, 0);
}

// Random flows over random resources: nothing gives more than it has, and every flow is stopped by
// its cap or by a full resource of which it is among the fastest.
TEST(Sharing, IsMaxMinFairAndConserves) {
  Sharing sharing;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SampleRandom random(seed, 0, 0);
    std::vector<double> capacity(1 + random.below(6));
    for (double& c : capacity) c = random.uniform(1, 100);
    std::vector<Flow> flows(1 + random.below(12));
    for (Flow& f : flows) {
      f.cap = random.below(5) == 0 ? 0 : random.uniform(1, 80);
      for (uint32_t r = 0; r < capacity.size(); ++r) {
        if (random.below(2)) f.demand.emplace_back(r, random.uniform(0.05, 1));
      }
    }
    sharing.share(flows, capacity);
    std::vector<double> used(capacity.size(), 0), fastest(capacity.size(), 0);
    for (const Flow& f : flows) {
      EXPECT_LE(f.rate, f.cap * (1 + 1e-9));
      for (const auto& [r, amount] : f.demand) {
        used[r] += amount * f.rate;
        fastest[r] = std::max(fastest[r], f.rate);
      }
    }
    for (size_t r = 0; r < capacity.size(); ++r) EXPECT_LE(used[r], capacity[r] * (1 + 1e-6));
    for (const Flow& f : flows) {
      bool stopped = f.rate >= f.cap * (1 - 1e-6);
      for (const auto& [r, amount] : f.demand) {
        stopped |= used[r] >= capacity[r] * (1 - 1e-6) && f.rate >= fastest[r] * (1 - 1e-6);
      }
      EXPECT_TRUE(stopped) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace nostall::simulate
