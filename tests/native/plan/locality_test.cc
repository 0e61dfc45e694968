// Samples dealt to the nodes that keep them: global batches and shares stay the same.
#include "plan/locality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "plan/cluster.h"

namespace nostall::plan {
namespace {

JobSpec job(uint64_t samples, uint64_t batch, uint32_t world) {
  JobSpec spec;
  spec.samples = samples;
  spec.global_batch = batch;
  spec.epochs = 3;
  spec.world = world;
  return spec;
}

TEST(Locality, KeepsTheGlobalBatchesAndTheShares) {
  for (const auto& [samples, batch, world] :
       {std::tuple{100u, 12u, 4u}, {101u, 12u, 4u}, {57u, 10u, 6u}, {5u, 16u, 4u}}) {
    const JobSpec spec = job(samples, batch, world);
    const std::vector<uint64_t> sizes(samples, 10);
    const Nodes nodes = equal_nodes(spec, {samples * 4, samples * 4}, world / 2);
    const Ownership ownership = owners(spec, sizes, nodes);
    const std::vector<SampleId> order = epoch_order(spec, 1);
    std::vector<std::vector<SampleId>> dealt(batches_per_epoch(spec));
    uint64_t local = 0;
    for (uint32_t r = 0; r < world; ++r) {
      const RankEpoch plain = rank_epoch(spec, order, r);
      const RankEpoch mine = local_rank_epoch(spec, order, r, ownership, nodes.of_rank);
      EXPECT_EQ(mine.batch_ends, plain.batch_ends);
      uint64_t begin = 0;
      for (size_t h = 0; h < mine.batch_ends.size(); ++h) {
        for (; begin < mine.batch_ends[h]; ++begin) {
          dealt[h].push_back(mine.samples[begin]);
          local += ownership.owner[mine.samples[begin]] == nodes.of_rank[r];
        }
      }
    }
    for (size_t h = 0; h < dealt.size(); ++h) {
      const auto first = order.begin() + static_cast<ptrdiff_t>(h * batch);
      std::vector<SampleId> expected(
          first, first + static_cast<ptrdiff_t>(std::min<size_t>(batch, order.size() - h * batch)));
      std::sort(expected.begin(), expected.end());
      std::sort(dealt[h].begin(), dealt[h].end());
      EXPECT_EQ(dealt[h], expected);
    }
    if (samples > 50) {
      EXPECT_GT(local, samples / 3);
    }
  }
}

TEST(ClusterAccess, OwnedSamplesComeFirstAndCopiesNeedASecondRead) {
  const JobSpec spec = job(64, 8, 4);
  const std::vector<uint64_t> sizes(64, 10);
  const Nodes nodes = equal_nodes(spec, {400, 400}, 2);
  const Ownership ownership = owners(spec, sizes, nodes);
  const NodeAccess own = node_access(spec, 2, 2);
  const NodeAccess shared = cluster_access(ownership, 1, own);
  const uint32_t most = *std::max_element(own.frequency.begin(), own.frequency.end());
  for (SampleId s = 0; s < 64; ++s) {
    ASSERT_NE(ownership.owner[s], kNoOwner);
    if (ownership.owner[s] == 1) {
      EXPECT_GT(shared.frequency[s], most);
      EXPECT_EQ(shared.first_access[s], ownership.first_access[s]);
    } else {
      EXPECT_EQ(shared.frequency[s], own.frequency[s] < 2 ? 0 : own.frequency[s]);
    }
  }
}

TEST(PlaceCluster, CopiesComeAndGoOnlyWhereNotAllThatIsReadAgainHasRoom) {
  JobSpec spec = job(64, 8, 4);
  spec.epochs = 6;
  const std::vector<uint64_t> sizes(64, 10);
  const Ownership ownership = owners(spec, sizes, equal_nodes(spec, {400, 400}, 2));
  NodeAccess own = node_access(spec, 2, 2);
  const auto placed = [&](uint64_t capacity) {
    return place_cluster(sizes, ownership, 1, own, {{capacity, 0}}, CopyRule::next_use);
  };
  uint64_t needed = 0;
  for (SampleId s = 0; s < 64; ++s) {
    if (ownership.owner[s] == 1 || own.frequency[s] > 1) needed += 10;
  }
  const Placement all = placed(needed);
  EXPECT_EQ(all.copies.count(), 0u);
  EXPECT_EQ(all.tier, place_cluster(sizes, ownership, 1, own, {{needed, 0}}, CopyRule::fixed).tier);
  const Placement most = placed(needed - 1);
  EXPECT_GT(most.copies.count(), 0u);
  EXPECT_LE(most.used[0] + most.copies.bytes(), needed - 1);
  own.whole = false;  // what is read once in these epochs may be read again behind them
  EXPECT_GT(placed(needed).copies.count(), 0u);
}

TEST(ClusterAccess, OwnedSamplesComeBeforeThoseThatAnOrderRepeats) {
  JobSpec spec = job(8, 4, 4);
  spec.order = OrderKind::user;
  std::vector<SampleId> order(400, 0);
  order[3] = 1;
  spec.user_order = std::make_shared<const std::vector<SampleId>>(order);
  const Nodes nodes = equal_nodes(spec, {10, 10}, 2);
  const Ownership ownership = owners(spec, std::vector<uint64_t>(8, 10), nodes);
  ASSERT_EQ(ownership.owner[0], 0u);
  ASSERT_EQ(ownership.owner[1], 1u);
  const NodeAccess shared = cluster_access(ownership, 1, node_access(spec, 2, 2));
  EXPECT_GT(shared.frequency[1], shared.frequency[0]);
}

TEST(Owners, TellWhoReadsARepeatedSampleFirst) {
  JobSpec spec = job(4, 4, 4);
  spec.order = OrderKind::user;
  spec.user_order =
      std::make_shared<const std::vector<SampleId>>(std::vector<SampleId>{0, 1, 2, 0});
  const Ownership ownership =
      owners(spec, std::vector<uint64_t>(4, 10), equal_nodes(spec, {1000, 1000}, 2));
  EXPECT_EQ(ownership.first_reader[0], 0u);
  EXPECT_EQ(ownership.first_access[0], 0u);
  EXPECT_EQ(ownership.owner[3], kNoOwner);
}

TEST(Owners, TellWhoReadsARepeatedSampleNextWhereTheJobGoesOn) {
  JobSpec spec = job(4, 4, 4);
  spec.order = OrderKind::user;
  spec.user_order =
      std::make_shared<const std::vector<SampleId>>(std::vector<SampleId>{0, 1, 2, 3, 3, 1, 2, 0});
  const Ownership ownership =
      owners(spec, std::vector<uint64_t>(4, 10), equal_nodes(spec, {1000, 1000}, 2), {0, 1});
  EXPECT_EQ(ownership.first_reader, (std::vector<uint32_t>{1, 0, 1, 0}));
  EXPECT_EQ(ownership.first_access, (std::vector<uint64_t>{7, 5, 6, 4}));
}

TEST(Owners, TellWhoReadsFirst) {
  const JobSpec spec = job(40, 8, 4);
  const Nodes nodes = equal_nodes(spec, {1000, 1000}, 2);
  const Ownership ownership = owners(spec, std::vector<uint64_t>(40, 10), nodes);
  const std::vector<SampleId> order = epoch_order(spec, 0);
  for (uint64_t p = 0; p < order.size(); ++p) {
    EXPECT_EQ(ownership.first_access[order[p]], p);
    EXPECT_EQ(ownership.first_reader[order[p]], (p % 8) % 4 / 2);
  }
  const Ownership later = owners(spec, std::vector<uint64_t>(40, 10), nodes, {2, 0});
  EXPECT_EQ(later.first_access[epoch_order(spec, 2)[3]], 2 * 40 + 3u);
  EXPECT_EQ(later.first_reader[epoch_order(spec, 2)[3]], 1u);
  const Ownership within = owners(spec, std::vector<uint64_t>(40, 10), nodes, {2, 1});
  EXPECT_EQ(within.first_access[epoch_order(spec, 2)[8]], 2 * 40 + 8u);
  EXPECT_EQ(within.first_access[epoch_order(spec, 2)[7]], kNever);
  EXPECT_EQ(within.owner, ownership.owner);
}

TEST(NodeAccess, BeginsWithTheBatchThatTheJobGoesOnWith) {
  for (const OrderKind order : {OrderKind::torch, OrderKind::keyed}) {
    JobSpec spec = job(40, 8, 4);
    spec.order = order;
    const NodeAccess whole = node_access(spec, 0, 4, {1, 0}),
                     rest = node_access(spec, 0, 4, {1, 3});
    const std::vector<SampleId> ids = epoch_order(spec, 1);
    for (uint64_t p = 0; p < ids.size(); ++p) {
      const SampleId s = ids[p];
      EXPECT_EQ(rest.frequency[s], whole.frequency[s] - (p < 24 ? 1 : 0));
      if (p < 24) {
        EXPECT_GE(rest.first_access[s], 2 * 40u);
      } else {
        EXPECT_EQ(rest.first_access[s], 40 + p);
      }
    }
  }
}

TEST(Owners, OfSomeEpochsAreThoseOfAJobThatHasNoMore) {
  for (const bool leaves_out : {false, true}) {
    JobSpec spec = job(60, 8, 4);
    spec.epochs = 12;
    spec.drop_last = leaves_out;  // 60 samples, in batches of 8
    JobSpec few = spec;
    few.epochs = 4;
    const Nodes nodes = equal_nodes(spec, {200, 200}, 2);
    const std::vector<uint64_t> sizes(60, 10);
    const Ownership some = owners(spec, sizes, nodes, {9, 1}, Epochs{0, 4});
    EXPECT_EQ(some.owner, owners(few, sizes, nodes).owner);
    // First accesses are those of the epochs that are left, whichever the owners are of.
    const Ownership all = owners(spec, sizes, nodes, {9, 1});
    EXPECT_NE(some.owner, all.owner);
    EXPECT_EQ(some.first_access, all.first_access);
    EXPECT_EQ(some.first_reader, all.first_reader);
    EXPECT_NE(owners(spec, sizes, nodes, {9, 1}, Epochs{9, 12}).owner, some.owner);
  }
  const JobSpec spec = job(60, 8, 4);
  const Nodes nodes = equal_nodes(spec, {200, 200}, 2);
  EXPECT_THROW(owners(spec, std::vector<uint64_t>(60, 10), nodes, {}, Epochs{2, 5}), Error);
  EXPECT_THROW(owners(spec, std::vector<uint64_t>(60, 10), nodes, {}, Epochs{2, 2}), Error);
}

TEST(Owners, AreTheSameWhereverTheJobResumes) {
  const JobSpec spec = job(60, 8, 4);
  const Nodes nodes = equal_nodes(spec, {200, 200}, 2);
  const std::vector<uint64_t> sizes(60, 10);
  EXPECT_EQ(owners(spec, sizes, nodes).owner, owners(spec, sizes, nodes, {2, 5}).owner);
}

}  // namespace
}  // namespace nostall::plan
