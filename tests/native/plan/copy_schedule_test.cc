// What the ranks of a node do with copies, each by itself: together it is one walk over the node's accesses.
#include "plan/copy_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

namespace nostall::plan {
namespace {

JobSpec job(uint32_t epochs) {
  JobSpec spec;
  spec.samples = 101;
  spec.global_batch = 12;
  spec.world = 4;
  spec.epochs = epochs;
  spec.seed = 5;
  return spec;
}

bool copied(SampleId s) { return s % 2 == 1; }

// Hits of the node of ranks 2 and 3, from an epoch on; its ranks' uses are checked against each other.
uint64_t walk(const JobSpec& spec, uint32_t first_epoch) {
  const std::vector<uint64_t> sizes(spec.samples, 100);
  const CopyPlaces places(sizes, copied, 2500);
  std::vector<CopySchedule> ranks;
  for (const uint32_t rank : {2u, 3u}) {
    ranks.emplace_back(spec, 2, 2, rank, first_epoch, sizes, places, copied);
  }
  std::map<uint32_t, std::pair<SampleId, uint32_t>> in;  // and the batch in which it came
  uint64_t hits = 0;
  for (uint32_t epoch = first_epoch; epoch < spec.epochs; ++epoch) {
    std::vector<std::vector<CopyUse>> uses;
    std::vector<RankEpoch> read;
    for (const uint32_t rank : {2u, 3u}) {
      uses.push_back(ranks[rank - 2].next_epoch());
      read.push_back(rank_epoch(spec, epoch, rank));
      EXPECT_EQ(uses.back().size(), read.back().samples.size());
    }
    std::vector<size_t> at(2, 0);
    for (uint64_t h = 0; h < batches_in(spec, epoch); ++h) {
      for (const size_t r : {size_t{0}, size_t{1}}) {
        for (; at[r] < read[r].batch_ends[h]; ++at[r]) {
          const CopyUse use = uses[r].at(at[r]);
          const SampleId sample = read[r].samples[at[r]];
          if (!copied(sample)) {
            EXPECT_EQ(use.place, kNoPlace);
          }
          if (use.held) {
            EXPECT_EQ(in[use.place], std::pair(sample, use.filled));
          } else if (use.keep) {
            EXPECT_EQ(use.filled, epoch * batches_per_epoch(spec) + h);
            in[use.place] = {sample, use.filled};
          }
          hits += use.held ? 1 : 0;
        }
      }
    }
  }
  EXPECT_TRUE(ranks[0].next_epoch().empty());
  return hits;
}

TEST(CopySchedule, IsTheSameForAllRanksOfANode) {
  EXPECT_EQ(walk(job(1), 0), 0u);
  const uint64_t all = walk(job(20), 0);  // more epochs than are known ahead
  EXPECT_GT(all, 19u * 12);               // of some 25 copied accesses an epoch
  const uint64_t later = walk(job(20), 10);
  EXPECT_GT(later, 0u);
  EXPECT_LT(later, all);
}

TEST(CopySchedule, LooksAheadByTheLengthOfAnEpochNotByTheSamples) {
  JobSpec spec;
  spec.samples = 10;
  spec.order = OrderKind::user;
  std::vector<SampleId> order(uint64_t{1} << 20);
  for (uint64_t i = 0; i < order.size(); ++i) order[i] = i % 10;
  spec.user_order = std::make_shared<const std::vector<SampleId>>(std::move(order));
  spec.global_batch = 1 << 12;
  spec.world = 64;
  spec.epochs = 1000;
  const std::vector<uint64_t> sizes(spec.samples, 100);
  uint64_t looked = 0;
  const auto counted = [&](SampleId s) { return ++looked, s % 2 == 1; };
  CopySchedule schedule(spec, 0, 1, 0, 0, sizes, CopyPlaces(sizes, copied, 200), counted);
  const uint64_t of_epoch = schedule.next_epoch().size();
  EXPECT_EQ(of_epoch, (uint64_t{1} << 20) / 64);
  EXPECT_LE(looked, 33 * of_epoch);  // 2^25 of all ranks
}

TEST(CopySchedule, EndsWhereItIsStopped) {
  const JobSpec spec = job(20);
  const std::vector<uint64_t> sizes(spec.samples, 100);
  uint64_t looked = 0;
  std::stop_source stop;
  const auto counted = [&](SampleId s) {
    if (++looked == 5) stop.request_stop();
    return copied(s);
  };
  CopySchedule schedule(spec, 2, 2, 2, 0, sizes, CopyPlaces(sizes, copied, 2500), counted);
  (void)schedule.next_epoch(stop.get_token());
  EXPECT_EQ(looked, 6u);  // one batch of two ranks
}

TEST(CopySchedule, DecidesNothingOnceItIsStopped) {
  const JobSpec spec = job(3);  // known at the first call
  const std::vector<uint64_t> sizes(spec.samples, 100);
  const CopyPlaces places(sizes, copied, 2500);
  uint64_t looked = 0, last = 0;
  std::stop_source stop;
  const auto counted = [&](SampleId s) {
    if (++looked == last) stop.request_stop();
    return copied(s);
  };
  EXPECT_FALSE(CopySchedule(spec, 2, 2, 2, 0, sizes, places, counted).next_epoch().empty());
  last = std::exchange(looked, 0);
  EXPECT_TRUE(
      CopySchedule(spec, 2, 2, 2, 0, sizes, places, counted).next_epoch(stop.get_token()).empty());
  EXPECT_EQ(looked, last);
}

TEST(CopySchedule, AShuffleEndsWhereItIsStopped) {
  std::stop_source stop;
  stop.request_stop();
  std::vector<uint32_t> order;
  epoch_order_into(job(3), 0, order, stop.get_token());
  EXPECT_TRUE(std::ranges::is_sorted(order.begin(), order.begin() + 101));
}

}  // namespace
}  // namespace nostall::plan
