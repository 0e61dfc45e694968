// Which samples stand in for a bad one, and how often an order repeats a sample.
#include "plan/stand_in.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <memory>
#include <set>

#include "plan/mixture.h"
#include "plan/plan.h"

namespace nostall::plan {
namespace {

// docs/formats/order.md
JobSpec thousand(uint64_t seed) {
  JobSpec spec;
  spec.samples = 1000;
  spec.seed = seed;
  return spec;
}

std::vector<SampleId> first_of(const JobSpec& spec, SampleId bad, size_t count = 4) {
  const StandIns stand_ins(spec);
  StandIns::Candidates candidates = stand_ins.of(bad);
  std::vector<SampleId> first(count);
  for (SampleId& id : first) id = candidates.next();
  return first;
}

TEST(StandIns, FollowFromSeedAndSample) {
  EXPECT_EQ(first_of(thousand(0), 0), (std::vector<SampleId>{79, 401, 360, 869}));
  EXPECT_EQ(first_of(thousand(7), 123), (std::vector<SampleId>{994, 773, 782, 435}));
}

TEST(StandIns, AreOfTheSamplesThatTheOrderCanGive) {
  JobSpec spec = thousand(7);
  const auto one_in_three = [](SampleId id) { return id % 3 == 0; };
  std::vector<double> weights(spec.samples);
  for (SampleId id = 0; id < spec.samples; ++id) weights[id] = one_in_three(id);
  spec.order = OrderKind::weighted;
  spec.weights = std::make_shared<const std::vector<double>>(weights);
  EXPECT_EQ(first_of(spec, 123), (std::vector<SampleId>{540, 609, 516, 885}));
  const std::vector<SampleId> many = first_of(spec, 123, 10'000);
  EXPECT_TRUE(std::all_of(many.begin(), many.end(), one_in_three));
  EXPECT_EQ(std::set<SampleId>(many.begin(), many.end()).size(), 334);

  spec.order = OrderKind::user;
  spec.user_order =
      std::make_shared<const std::vector<SampleId>>(std::vector<SampleId>{500, 2, 500, 7});
  EXPECT_EQ(first_of(spec, 123), (std::vector<SampleId>{500, 2, 500, 7}));

  spec.order = OrderKind::mixture;
  spec.mixture = std::make_shared<const Mixture>(
      Mixture::Spec{{300, 200, 100, 400}, {{0, {1, 0, 0, 1}}, {64, {1, 0, 2, 1}}}});
  for (const SampleId id : first_of(spec, 123, 10'000)) EXPECT_TRUE(id < 300 || id >= 500) << id;
  // A weight for every sample of a source, and a source for every sample: all stand in, as ever.
  spec.mixture = std::make_shared<const Mixture>(Mixture::Spec{{300, 700}, {{0, {1, 2}}}});
  EXPECT_EQ(first_of(spec, 123), (std::vector<SampleId>{994, 773, 782, 435}));
}

TEST(StandIns, HoldEightBytesOfEachSampleAtMost) {
  JobSpec spec;
  spec.samples = (1 << 20) + 2;  // one range more than a power of two
  std::vector<double> weights(spec.samples);
  for (SampleId id = 0; id < spec.samples; id += 2) weights[id] = 1.0;
  spec.order = OrderKind::weighted;
  spec.weights = std::make_shared<const std::vector<double>>(std::move(weights));
  const auto in_use = [] {
    const auto all = mallinfo2();
    return all.uordblks + all.hblkhd;
  };
  const size_t before = in_use();
  const StandIns stand_ins(spec);
  EXPECT_LE(in_use() - before, 8 * spec.samples + (1 << 20));
}

TEST(Occurrences, AreCountedOverAllRanksOfAUsersOrder) {
  JobSpec spec;
  spec.samples = 10;
  spec.global_batch = 4;
  spec.world = 2;
  spec.order = OrderKind::user;
  spec.user_order =
      std::make_shared<const std::vector<SampleId>>(std::vector<SampleId>{5, 3, 5, 5, 3, 0, 1, 5});
  const std::vector<SampleId> order = epoch_order(spec, 0);
  EXPECT_EQ(occurrences(spec, order), (std::vector<uint32_t>{0, 0, 1, 2, 1, 0, 0, 3}));
  EXPECT_EQ(rank_epoch(spec, order, 0).occurrences, (std::vector<uint32_t>{0, 1, 1, 0}));
  EXPECT_EQ(rank_epoch(spec, order, 1).occurrences, (std::vector<uint32_t>{0, 2, 0, 3}));
  // None where nothing repeats, and none for what pads an order that is not the user's.
  spec.user_order =
      std::make_shared<const std::vector<SampleId>>(std::vector<SampleId>{4, 3, 2, 1});
  EXPECT_TRUE(rank_epoch(spec, 0, 0).occurrences.empty());
  spec.order = OrderKind::torch;
  spec.samples = 7;
  EXPECT_TRUE(rank_epoch(spec, 0, 1).occurrences.empty());
}

}  // namespace
}  // namespace nostall::plan
