// Both engines of the simulator, held against what can be computed by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "machine.h"
#include "simulate/simulate.h"

namespace nostall::simulate {
namespace {

double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

Decision loading(Loading how) {
  Decision decision;
  decision.loading = how;
  return decision;
}

TEST(LowerBound, IsTheSlowestNodesBytesOverC) {
  const Model model = small_cluster();
  const plan::JobSpec spec = training(4000, 3);
  const std::vector<double> sizes(4000, 0.5);
  // 3 epochs of 50 batches, each of 20 samples of 0.5 MB a node.
  const double expected = 3 * 50 * 20 * 0.5 / 100;
  for (const auto engine : {published, consistent}) {
    const Result result = engine(model, spec, sizes, loading(Loading::perfect));
    EXPECT_NEAR(result.seconds, expected, 1e-9);
    EXPECT_NEAR(sum(result.batch_seconds), expected, 1e-9);
    EXPECT_EQ(sum(result.staged) - result.staged[0], 0);
  }
}

TEST(Published, OneNodeOnDemandIsFetchWriteCompute) {
  const Model model = small_cluster(1);
  const plan::JobSpec spec = training(400, 2, 1);
  const std::vector<double> sizes = sizes_of(400, 0.1);
  const Result result = published(model, spec, sizes, loading(Loading::on_demand));
  const double mb = 2 * sum(sizes);
  EXPECT_NEAR(result.seconds, mb * (1.0 / 66 + 1.0 / 200 + 1.0 / 100), 1e-6);
  EXPECT_NEAR(result.staged.back(), mb, 1e-6);
}

TEST(Published, OneNodeStagedIsEquation33) {
  const Model model = small_cluster(1);
  const plan::JobSpec spec = training(400, 2, 1);
  const std::vector<double> sizes = sizes_of(400, 0.1);
  const Result result = published(model, spec, sizes, loading(Loading::staged));
  // (1/66 + 1/200) / 2 is more than 1/100: reading decides. At the end of a batch the reader
  // stands still while the last sample is consumed.
  const double read = 2 * sum(sizes) * (1.0 / 66 + 1.0 / 200) / 2;
  EXPECT_GT(result.seconds, read);
  EXPECT_LT(result.seconds, read * 1.03);
}

// One of 25 samples, larger than the staging buffers.
std::vector<double> with_large(uint64_t samples, double large) {
  std::vector<double> sizes = sizes_of(samples, 0.1);
  for (size_t s = 0; s < samples; s += 25) sizes[s] = large;
  return sizes;
}

TEST(Published, ReadsAheadBehindWhatWasReadAtOnce) {
  Model model = small_cluster(1);
  model.classes[0].capacity = 4;
  const plan::JobSpec spec = training(400, 2, 1);
  const std::vector<double> sizes = with_large(400, 5);
  const Result staged = published(model, spec, sizes, loading(Loading::staged));
  const Result on_demand = published(model, spec, sizes, loading(Loading::on_demand));
  // Everything once, and in the small samples' time: half of what reading them on demand takes.
  EXPECT_NEAR(staged.staged.back(), 2 * sum(sizes), 1e-6);
  const double large = 2 * 16 * 5 * (1.0 / 66 + 1.0 / 200 + 1.0 / 100);
  EXPECT_LT(staged.seconds - large, (on_demand.seconds - large) / 2);
}

TEST(Consistent, BatchesThatAreLargerThanTheStagingBufferCome) {
  Model model = small_cluster(1);
  model.classes[0].capacity = 1;
  plan::JobSpec spec = training(400, 2, 1);
  spec.global_batch = 1;
  const std::vector<double> sizes = with_large(400, 5);
  const Result result = consistent(model, spec, sizes, loading(Loading::staged));
  EXPECT_NEAR(result.staged.back(), 2 * sum(sizes), 1e-6);
}

TEST(Consistent, TakesNoMoreThanTheSourceGives) {
  const Model model = small_cluster();
  const plan::JobSpec spec = training(4000, 3);
  const std::vector<double> sizes = sizes_of(4000, 0.5);
  const Result result = consistent(model, spec, sizes, loading(Loading::staged));
  const double least = 3 * sum(sizes) / 146;  // four nodes together, not 292 MB/s
  EXPECT_GE(result.seconds, least);
  EXPECT_LE(result.seconds, least * 1.01);
}

TEST(Consistent, OwnersReadOnceAndReachTheBound) {
  const Model model = small_cluster();
  const plan::JobSpec spec = training(4000, 4);
  const std::vector<double> sizes = sizes_of(4000, 0.5);
  const std::vector<uint64_t> bytes = bytes_of(sizes), room = {uint64_t{51200} << 20, 0};
  const Result result = consistent(model, spec, sizes, keep_owned(spec, bytes, room));
  EXPECT_NEAR(result.staged.back(), sum(sizes), 1e-6 * sum(sizes));
  EXPECT_EQ(result.kept_from_source, 0);
  const double compute = sum(result.compute_seconds) / 4;
  const double bound = std::max(compute, sum(sizes) / 146) + 3 * compute;
  EXPECT_LE(result.seconds, bound * 1.01);
}

TEST(Consistent, EveryByteHasOneOrigin) {
  Model model = small_cluster();
  model.classes[1].capacity = 300;
  model.classes[2].capacity = 400;
  const plan::JobSpec spec = training(4000, 4);
  const std::vector<double> sizes = sizes_of(4000, 0.5);
  const std::vector<uint64_t> bytes = bytes_of(sizes), room = {300'000'000, 400'000'000};
  for (const Decision& decision :
       {keep_owned(spec, bytes, room), keep_frequent(spec, bytes, room, true)}) {
    for (const auto engine : {published, consistent}) {
      const Result result = engine(model, spec, sizes, decision);
      // As published, a sample that comes too late is read a second time.
      EXPECT_GE(sum(result.staged), 4 * sum(sizes) - 1e-3);
      if (engine == consistent) {
        EXPECT_NEAR(sum(result.staged), 4 * sum(sizes), 1e-3);
      }
      EXPECT_GE(result.seconds, sum(result.compute_seconds));
    }
  }
}

TEST(Consistent, ManyNodesPoolTheirDevices) {
  const Model model = small_cluster(80);
  const plan::JobSpec spec = training(16000, 2, 80);
  const std::vector<double> sizes(16000, 0.5);
  const std::vector<uint64_t> bytes = bytes_of(sizes), room = {100'000'000'000, 0};
  const Result result = consistent(model, spec, sizes, keep_owned(spec, bytes, room));
  EXPECT_NEAR(result.staged.back(), 8000, 1e-3);
  EXPECT_GE(result.seconds, 8000.0 / 146 + 10 * 20 * 0.5 / 100);
}

TEST(Engines, FillBeforeTheTraining) {
  const Model model = small_cluster();
  const plan::JobSpec spec = training(4000, 2);
  const std::vector<double> sizes(4000, 0.5);
  Decision decision;
  decision.filling = Filling::before;
  decision.keep.assign(4, {{}});
  for (uint32_t s = 0; s < 4000; ++s) decision.keep[s % 4][0].push_back(s);
  const Result all_at_once = published(model, spec, sizes, decision);
  EXPECT_NEAR(all_at_once.initial_seconds, 500 * (1 / 36.5 + 1.0 / 200) / 2, 1e-6);
  EXPECT_EQ(all_at_once.staged.back(), 0);
  const Result fluid = consistent(model, spec, sizes, decision);
  EXPECT_NEAR(fluid.initial_seconds, 2000.0 / 146, 1e-6);
  // As published, what has an owner elsewhere comes from there.
  for (uint32_t s = 0; s < 4000; ++s) {
    decision.owner.push_back(s % 4);
    if (s % 4 != 3) decision.keep[3][0].push_back(s);
  }
  const Result copied = published(model, spec, sizes, decision);
  EXPECT_NEAR(copied.initial_seconds,
              all_at_once.initial_seconds + 1500 * (1.0 / 10000 + 1.0 / 200) / 2, 1e-6);
  EXPECT_NEAR(copied.kept_from_nodes, 1500, 1e-6);
}

TEST(Engines, DropWhatIsNotReadAgain) {
  Model model = small_cluster();
  model.classes[1].capacity = 100;
  model.classes[2].capacity = 0.001;
  const plan::JobSpec spec = training(4000, 4);
  const std::vector<double> sizes = sizes_of(4000, 0.5);
  const std::vector<uint64_t> bytes = bytes_of(sizes), room = {100'000'000, 0};
  Decision decision = keep_frequent(spec, bytes, room, true);
  decision.cleanup = true;
  // More than fits follows; what fits at any time is a part of it.
  for (uint32_t s = 0; s < 4000; ++s) {
    for (uint32_t node = 0; node < 4; ++node) {
      auto& list = decision.keep[node][0];
      if (std::find(list.begin(), list.end(), s) == list.end()) list.push_back(s);
    }
  }
  for (const auto engine : {published, consistent}) {
    const Result result = engine(model, spec, sizes, decision);
    EXPECT_GE(sum(result.staged), 4 * sum(sizes) - 1e-3);
    // With room for 100 MB of 3000 a node, at most that much is spared in each epoch and more as
    // samples are dropped: most still comes from the source.
    EXPECT_GT(result.staged.back(), 2 * sum(sizes));
    EXPECT_GT(result.kept_from_source, 4 * 100.0);  // went on as room came free
  }
}

TEST(Consistent, EvictionKeepsTheLastCopy) {
  Model model = small_cluster();
  const plan::JobSpec spec = training(4000, 8);
  const std::vector<double> sizes = sizes_of(4000, 0.5);
  const std::vector<uint64_t> bytes = bytes_of(sizes);
  Decision evicting;
  evicting.filling = Filling::evicting;
  // A node's storage, of 3,000 MB in all: no room beside one copy, some, all.
  for (const double room : {760.0, 1500.0, 3100.0}) {
    model.classes[1].capacity = room / 3;
    model.classes[2].capacity = room - room / 3;
    const auto mb = [](double m) { return static_cast<uint64_t>(m * 1e6); };
    const std::vector<uint64_t> rooms = {mb(room / 3), mb(room - room / 3)};
    const Decision kept = keep_owned(spec, bytes, rooms);
    const Result fixed = consistent(model, spec, sizes, kept);
    const Result result = consistent(model, spec, sizes, evicting);
    EXPECT_NEAR(result.staged.back(), sum(sizes), 1e-6 * sum(sizes)) << room;
    EXPECT_NEAR(fixed.staged.back(), sum(sizes), 1e-6 * sum(sizes)) << room;
    EXPECT_NEAR(sum(result.staged), 8 * sum(sizes), 1e-3);
    const auto local = [](const Result& r) { return r.staged[0] + r.staged[1]; };
    EXPECT_GT(local(result), 0.9 * local(fixed)) << room;
    const Decision copies = keep_owned(spec, bytes, rooms, plan::CopyRule::next_use);
    const Result owned = consistent(model, spec, sizes, copies);
    EXPECT_THROW(published(model, spec, sizes, copies), Error);
    EXPECT_NEAR(owned.staged.back(), sum(sizes), 1e-6 * sum(sizes)) << room;
    EXPECT_GT(local(owned), 0.9 * local(fixed)) << room;
    EXPECT_NEAR(sum(owned.staged), 8 * sum(sizes), 1e-3);
  }
  // Nothing to keep all in: what is held stays, and every epoch reads the rest.
  model.classes[1].capacity = 300;
  model.classes[2].capacity = 0.001;
  const Result over = consistent(model, spec, sizes, evicting);
  EXPECT_NEAR(over.staged.back(), sum(sizes) + 7 * (sum(sizes) - 4 * 300), 0.01 * sum(sizes));
  EXPECT_THROW(published(model, spec, sizes, evicting), Error);
}

TEST(Engines, RefuseWhatDoesNotGoTogether) {
  const Model model = small_cluster();
  const plan::JobSpec spec = training(400, 1);
  const std::vector<double> sizes(400, 0.5), few(399, 0.5);
  const auto refused = [&](const std::vector<double>& s, const Decision& decision,
                           const std::string& names) {
    for (const auto engine : {published, consistent}) {
      try {
        engine(model, spec, s, decision);
        FAIL() << names << " was not refused";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::usage);
        EXPECT_THAT(error.what(), testing::HasSubstr(names));
      }
    }
  };
  refused(few, {}, "399 sizes");
  std::vector<double> negative = sizes;
  negative[7] = -1;
  refused(negative, {}, "sample 7");
  Decision decision;
  decision.keep = {{{0}}, {{1}}};
  refused(sizes, decision, "2 nodes of 4");
  decision.keep = {{{0, 0}}, {}, {}, {}};
  refused(sizes, decision, "twice");
  decision.keep = {{{400}}, {}, {}, {}};
  refused(sizes, decision, "sample 400");
  decision.keep = {{{}, {}, {1}}, {}, {}, {}};
  refused(sizes, decision, "storage class 3");
  Decision full;
  full.keep.assign(4, {{}, {}});
  for (uint32_t s = 0; s < 400; ++s) full.keep[2][1].push_back(s);
  Model small = model;
  small.classes[2].capacity = 100;  // and 200 MB are to be kept
  EXPECT_THROW(published(small, spec, sizes, full), Error);
  decision = {};
  decision.order = {{1}};
  refused(sizes, decision, "one list for each");
  decision = {};
  decision.filling = Filling::prefetch;
  refused(sizes, decision, "without naming");
  decision = {};
  decision.owner.assign(400, 4);
  refused(sizes, decision, "node 4 of 4");
}

TEST(Layouts, OwnOnlyReadsWhatItKeepsEquallyOften) {
  const plan::JobSpec spec = training(400, 2);
  Decision decision;
  decision.filling = Filling::before;
  decision.keep.assign(4, {{}});
  for (uint32_t s = 0; s < 200; ++s) decision.keep[s % 4][0].push_back(s);
  read_own_only(spec, decision);
  for (uint32_t node = 0; node < 4; ++node) {
    std::vector<int> reads(400, 0);
    for (const uint32_t s : decision.order[node]) {
      EXPECT_EQ(s % 4, node);
      EXPECT_LT(s, 200u);
      ++reads[s];
    }
    EXPECT_EQ(*std::max_element(reads.begin(), reads.end()), 2);  // 100 reads of 50 samples
  }
}

TEST(Layouts, LocalFirstKeepsGlobalBatches) {
  const plan::JobSpec spec = training(400, 2);
  Decision decision;
  decision.keep.assign(4, {{}});
  for (uint32_t s = 0; s < 400; ++s) decision.keep[s % 4][0].push_back(s);
  read_local_first(spec, decision);
  uint64_t local = 0;
  for (uint32_t epoch = 0; epoch < 2; ++epoch) {
    const std::vector<plan::SampleId> order = plan::epoch_order(spec, epoch);
    for (uint64_t h = 0; h < 5; ++h) {
      std::vector<uint64_t> planned(order.begin() + h * 80, order.begin() + (h + 1) * 80), dealt;
      for (uint32_t node = 0; node < 4; ++node) {
        const auto& mine = decision.order[epoch * 4 + node];
        dealt.insert(dealt.end(), mine.begin() + h * 20, mine.begin() + (h + 1) * 20);
        for (uint64_t k = h * 20; k < (h + 1) * 20; ++k) local += mine[k] % 4 == node;
      }
      EXPECT_THAT(dealt, testing::UnorderedElementsAreArray(planned));
    }
  }
  EXPECT_GT(local, 600u);  // of 800; 200 by chance
}

}  // namespace
}  // namespace nostall::simulate
