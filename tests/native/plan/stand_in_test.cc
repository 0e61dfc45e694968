// Which samples stand in for a bad one, and how often an order repeats a sample.
#include "plan/stand_in.h"

#include <gtest/gtest.h>

#include "plan/plan.h"

namespace nostall::plan {
namespace {

// docs/formats/order.md
TEST(StandIns, FollowFromSeedAndSample) {
  StandIns first(0, 0, 1000), other(7, 123, 1000);
  for (const SampleId id : {79u, 401u, 360u, 869u}) EXPECT_EQ(first.next(), id);
  for (const SampleId id : {994u, 773u, 782u, 435u}) EXPECT_EQ(other.next(), id);
}

TEST(Occurrences, AreCountedOverAllRanksOfAUsersOrder) {
  JobSpec spec;
  spec.samples = 10;
  spec.global_batch = 4;
  spec.world = 2;
  spec.order = OrderKind::user;
  spec.user_order = {5, 3, 5, 5, 3, 0, 1, 5};
  const std::vector<SampleId> order = epoch_order(spec, 0);
  EXPECT_EQ(occurrences(spec, order), (std::vector<uint32_t>{0, 0, 1, 2, 1, 0, 0, 3}));
  EXPECT_EQ(rank_epoch(spec, order, 0).occurrences, (std::vector<uint32_t>{0, 1, 1, 0}));
  EXPECT_EQ(rank_epoch(spec, order, 1).occurrences, (std::vector<uint32_t>{0, 2, 0, 3}));
  // None where nothing repeats, and none for what pads an order that is not the user's.
  spec.user_order = {4, 3, 2, 1};
  EXPECT_TRUE(rank_epoch(spec, 0, 0).occurrences.empty());
  spec.order = OrderKind::torch;
  spec.samples = 7;
  EXPECT_TRUE(rank_epoch(spec, 0, 1).occurrences.empty());
}

}  // namespace
}  // namespace nostall::plan
