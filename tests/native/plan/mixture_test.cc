// Mixtures by what they promise, over every prefix; orders of buckets.
#include "plan/mixture.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/random.h"
#include "plan/plan.h"

namespace nostall::plan {
namespace {

using Weights = std::vector<double>;
using Ids = std::vector<uint64_t>;

Mixture mixture(std::vector<uint64_t> samples, Weights weights, AtEnd at_end = AtEnd::repeat) {
  return Mixture({std::move(samples), {{0, std::move(weights)}}, at_end});
}

// Places from 0 on: each source is less than one place from its share, and each place is what
// at() and counts() say.
void check_prefixes(const Mixture& mixed, const Shares& shares, uint64_t places) {
  Ids had(shares.of.size());
  for (uint64_t n = 1; n <= places; ++n) {
    const Mixture::Place place = mixed.at(n - 1);
    ASSERT_EQ(place.number, had[place.source]++);
    for (size_t i = 0; i < had.size(); ++i) {
      const auto off =
          static_cast<int64_t>(had[i] * shares.period) - static_cast<int64_t>(n * shares.of[i]);
      ASSERT_LT(std::abs(off), shares.period) << "source " << i << " after " << n;
    }
    if (n % 97 == 0) {
      ASSERT_EQ(mixed.counts(n), had);
    }
  }
}

TEST(Shares, AreTheWeightsWhereTheyAreFractions) {
  EXPECT_EQ(shares_of(Weights{0.7, 0.2, 0.1}).of, (std::vector<uint32_t>{7, 2, 1}));
  EXPECT_EQ(shares_of(Weights{1, 1, 1}).period, 3u);
  EXPECT_EQ(shares_of(Weights{30, 0, 10}).of, (std::vector<uint32_t>{3, 0, 1}));
  EXPECT_EQ(shares_of(Weights{0.333, 0.667}).of, (std::vector<uint32_t>{333, 667}));
  EXPECT_EQ(shares_of(Weights{5e-324}).period, 1u);
  // No fraction: multiples of 1 / 2^20, that add up; a weight above 0 is never lost.
  const Shares rounded = shares_of(Weights{std::sqrt(2.0), std::sqrt(3.0), 1e-9});
  EXPECT_EQ(rounded.period, kMostShares);
  EXPECT_EQ(std::accumulate(rounded.of.begin(), rounded.of.end(), 0u), kMostShares);
  EXPECT_EQ(rounded.of[2], 1u);
  EXPECT_EQ(shares_of(Weights{1e-20, 1}).of, (std::vector<uint32_t>{1, kMostShares - 1}));
  EXPECT_EQ(shares_of(Weights{1, 1e-20}).of, (std::vector<uint32_t>{kMostShares - 1, 1}));
  EXPECT_NEAR(rounded.of[0] / double(kMostShares), 0.449490, 2e-6);
}

TEST(Shares, OfBadWeightsAreRefused) {
  const double nan = std::nan(""), infinite = HUGE_VAL;
  for (const Weights& bad :
       {Weights{}, Weights{0, 0}, Weights{1, -1}, Weights{1, nan}, Weights{infinite, 1}}) {
    EXPECT_THROW(shares_of(bad), Error);
  }
  EXPECT_THROW(shares_of(Weights{1e308, 1e308}), Error);
  EXPECT_THROW(mixture({3, 4}, {1}), Error);
  EXPECT_THROW(mixture({3, 0}, {1, 1}), Error);
  EXPECT_THROW(mixture({}, {}), Error);
  EXPECT_THROW(Mixture({{1}, {{1, {1}}}, AtEnd::repeat}), Error);
  EXPECT_THROW(Mixture({{1}, {{0, {1}}, {5, {1}}, {5, {1}}}, AtEnd::repeat}), Error);
}

TEST(Mixture, HoldsItsSharesOverEveryPrefix) {
  SampleRandom random(11, 0, 0);
  for (int round = 0; round < 60; ++round) {
    Weights weights(1 + random.below(round % 2 == 0 ? 4 : 24));
    for (double& weight : weights) {
      weight = 1 + random.below(random.below(3) == 0 ? 1000 : 9);
      if (weights.size() > 2 && random.below(6) == 0) weight = 0;
    }
    weights[0] += 1;
    const Shares shares = shares_of(weights);
    std::vector<uint64_t> samples(weights.size(), 5);
    check_prefixes(mixture(samples, weights), shares, std::min<uint64_t>(3 * shares.period, 4000));
  }
}

TEST(Mixture, HoldsRoundedSharesFarOut) {
  const Weights weights{std::exp(1.0), std::acos(-1.0), 0.01};
  const Mixture mixed = mixture({1000, 10, 7}, weights);
  const Shares shares = shares_of(weights);
  const uint64_t far = 123'456'789'012;
  Ids had = mixed.counts(far);
  EXPECT_EQ(std::accumulate(had.begin(), had.end(), uint64_t{0}), far);
  for (uint64_t place = far; place < far + 2000; ++place) {
    const Mixture::Place at = mixed.at(place);
    EXPECT_EQ(at.number, had[at.source]++);
  }
  for (size_t i = 0; i < had.size(); ++i) {
    const double share = double(shares.of[i]) / shares.period * double(far + 2000);
    EXPECT_LT(std::fabs(double(had[i]) - share), 1.0);
  }
}

TEST(Mixture, RepeatsASourceInANewOrder) {
  const Mixture mixed = mixture({4, 100}, {0.5, 0.5});
  std::vector<uint64_t> ids(40), again(15);
  mixed.fill<uint64_t>(7, 0, 0, ids);
  std::vector<Ids> epochs(5);
  Ids small;
  for (const uint64_t id : ids) {
    if (id < 4) small.push_back(id);
  }
  ASSERT_EQ(small.size(), 20u);
  std::set<Ids> orders;
  for (size_t e = 0; e < 5; ++e) {
    const Ids epoch(small.begin() + ptrdiff_t(4 * e), small.begin() + ptrdiff_t(4 * e + 4));
    EXPECT_THAT(epoch, testing::UnorderedElementsAre(0, 1, 2, 3));
    orders.insert(epoch);
  }
  EXPECT_GT(orders.size(), 1u);
  // The same from any place on.
  mixed.fill<uint64_t>(7, 9, 25, again);
  EXPECT_EQ(again, Ids(ids.begin() + 25, ids.end()));
}

TEST(Mixture, StopsWhereASourceHasNothingLeft) {
  for (uint64_t first = 1; first < 30; ++first) {
    const Mixture mixed = mixture({first, 17, 1000}, {0.3, 0.2, 0.5}, AtEnd::stop);
    const Mixture endless = mixture({first, 17, 1000}, {0.3, 0.2, 0.5});
    uint64_t end = 0;
    for (;; ++end) {
      const Mixture::Place at = endless.at(end);
      if (at.number == (Ids{first, 17, 1000})[at.source]) break;
    }
    EXPECT_EQ(mixed.end(), end);
  }
}

TEST(Mixture, EndsManySourcesBetweenChanges) {
  constexpr size_t kSources = 40;
  Ids samples;
  Weights weights;
  for (size_t i = 0; i < kSources; ++i) {
    samples.push_back(5 + i);
    weights.push_back(std::sqrt(double(i + 1)));
  }
  const Weights other(weights.rbegin(), weights.rend());
  const Mixture mixed({samples, {{0, weights}, {37, other}, {300, weights}}, AtEnd::reweight});
  ASSERT_EQ(mixed.end(), std::accumulate(samples.begin(), samples.end(), uint64_t{0}));
  Ids had(kSources);
  for (uint64_t place = 0; place < mixed.end(); ++place) {
    ASSERT_EQ(mixed.counts(place), had) << place;
    const Mixture::Place at = mixed.at(place);
    ASSERT_EQ(at.number, had[at.source]++) << place;
  }
  EXPECT_EQ(had, samples);
}

TEST(Mixture, GivesTheWeightOfAnEndedSourceToTheOthers) {
  const std::vector<uint64_t> samples{10, 35, 200};
  const Weights weights{0.5, 0.25, 0.25};
  const Mixture mixed = mixture(samples, weights, AtEnd::reweight);
  ASSERT_EQ(mixed.end(), 245u);
  Ids ids(245), sorted(245);
  mixed.fill<uint64_t>(3, 2, 0, ids);
  sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  for (uint64_t i = 0; i < 245; ++i) EXPECT_EQ(sorted[i], i);
  // After the first source has ended, the others have halves until the second one ends.
  uint64_t end = 0, place = 0;
  for (; place < 245 && mixed.counts(place)[0] < 10; ++place) end = place;
  const Ids before = mixed.counts(end + 2);
  for (place = end + 2; mixed.counts(place)[1] < 35; ++place) {
    const Ids counts = mixed.counts(place);
    const double half = double(place - end - 2) / 2;
    EXPECT_LE(std::fabs(double(counts[1] - before[1]) - half), 1.0);
  }
  Ids other(245);
  mixed.fill<uint64_t>(3, 3, 0, other);
  EXPECT_NE(ids, other);
}

TEST(Mixture, IsRefusedIfItEndsBeforeSourcesGetTheirWeight) {
  const auto made = [](uint64_t place, AtEnd at_end) {
    return Mixture({{40, 40, 30}, {{0, {1, 1, 0}}, {place, {0, 1, 1}}}, at_end});
  };
  EXPECT_EQ(made(79, AtEnd::reweight).end(), 110u);
  EXPECT_EQ(made(80, AtEnd::reweight).end(), 110u);
  EXPECT_EQ(made(81, AtEnd::stop).end(), 80u);
  try {
    made(81, AtEnd::reweight);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::usage);
    EXPECT_THAT(error.what(), testing::HasSubstr("change after 81 samples"));
    EXPECT_THAT(error.what(), testing::HasSubstr("source 2 would not give 30 of its samples"));
  }
  // Nothing is lost where all samples came before the change.
  EXPECT_EQ(Mixture({{40, 40}, {{0, {1, 1}}, {500, {0, 1}}}, AtEnd::reweight}).end(), 80u);
}

TEST(Mixture, KeepsWhatWasBeforeAChange) {
  const std::vector<uint64_t> samples{50, 60, 70};
  const Mixture::Change first{0, {0.6, 0.4, 0}}, second{37, {0.1, 0.1, 0.8}}, third{90, {0, 0, 1}};
  const Mixture plain({samples, {first}, AtEnd::repeat});
  const Mixture changed({samples, {first, second}, AtEnd::repeat});
  const Mixture again({samples, {first, second, third}, AtEnd::repeat});
  const auto of = [](const Mixture& mixed, size_t places) {
    Ids ids(places);
    mixed.fill<uint64_t>(5, 0, 0, ids);
    return ids;
  };
  EXPECT_EQ(of(plain, 37), of(changed, 37));
  EXPECT_NE(of(plain, 200), of(changed, 200));
  EXPECT_EQ(of(changed, 90), of(again, 90));
  EXPECT_EQ(plain.fingerprint(37), changed.fingerprint(37));
  EXPECT_NE(plain.fingerprint(38), changed.fingerprint(38));
  EXPECT_NE(plain.fingerprint(), changed.fingerprint());
  Ids had = plain.counts(37);
  for (uint64_t place = 37; place < 300; ++place) {
    const Mixture::Place at = changed.at(place);
    ASSERT_EQ(at.number, had[at.source]++);
    ASSERT_EQ(changed.counts(place + 1), had);
    const double share = 0.8 * double(place + 1 - 37);
    EXPECT_LT(std::fabs(double(had[2]) - share), 1.0);
  }
}

JobSpec mixed_job(uint32_t world, uint64_t draws) {
  JobSpec spec;
  spec.samples = 110;
  spec.global_batch = 12;
  spec.world = world;
  spec.order_world = 2;
  spec.epochs = 5;
  spec.seed = 9;
  spec.order = OrderKind::mixture;
  spec.draws = draws;
  spec.mixture =
      std::make_shared<const Mixture>(Mixture::Spec{{10, 100}, {{0, {0.25, 0.75}}}, AtEnd::repeat});
  return spec;
}

TEST(MixtureOrder, GoesOnFromEpochToEpochInWholeBatches) {
  const JobSpec spec = mixed_job(2, 50);
  validate(spec);
  EXPECT_EQ(epoch_length(spec), 60u);
  Ids all(180), order;
  spec.mixture->fill<uint64_t>(9, 0, 0, all);
  for (uint32_t epoch = 0; epoch < 3; ++epoch) {
    const Ids one = epoch_order(spec, epoch);
    order.insert(order.end(), one.begin(), one.end());
  }
  EXPECT_EQ(order, all);
  EXPECT_EQ(epoch_order(mixed_job(6, 50), 2), epoch_order(spec, 2));
  // A sample that comes again within an epoch draws anew.
  EXPECT_EQ(occurrences(spec, epoch_order(spec, 0)).size(), 60u);
  JobSpec wrong = spec;
  wrong.samples = 111;
  EXPECT_THROW(validate(wrong), Error);
  wrong = mixed_job(2, 0);
  EXPECT_THROW(validate(wrong), Error);
}

// docs/formats/order.md
TEST(MixtureOrder, IsTheGoldenOne) {
  Ids ids(20);
  mixture({4, 6, 9}, {0.5, 0.3, 0.2}).fill<uint64_t>(7, 0, 0, ids);
  EXPECT_EQ(ids, (Ids{2, 6, 3, 11, 1, 8, 0, 15, 3, 5, 2, 4, 0, 16, 1, 7, 2, 18, 0, 9}));
}

JobSpec bucketed_job() {
  JobSpec spec;
  spec.samples = 1003;
  spec.global_batch = 8;
  spec.world = 4;
  spec.epochs = 3;
  spec.seed = 4;
  spec.order = OrderKind::bucketed;
  std::vector<uint32_t> buckets(spec.samples);
  for (uint64_t i = 0; i < spec.samples; ++i) buckets[i] = static_cast<uint32_t>(i * i % 7);
  spec.buckets = std::make_shared<const std::vector<uint32_t>>(buckets);
  return spec;
}

// A pattern is made as far as places are asked for.
TEST(Mixture, HasTheSamePlacesWhateverWasAskedBefore) {
  const auto made = [] { return mixture({1000, 700, 3}, {std::sqrt(2.0), 1.0, 0.01}); };
  const Mixture rising = made(), falling = made();
  const Ids asked{3, 4095, 4096, 5000, 300'000, kMostShares - 1, kMostShares, kMostShares + 5000};
  std::vector<Mixture::Place> up, down;
  for (const uint64_t place : asked) up.push_back(rising.at(place));
  for (auto place = asked.rbegin(); place != asked.rend(); ++place) {
    down.insert(down.begin(), falling.at(*place));
  }
  EXPECT_EQ(up, down);
  Ids filled(10'000), piece(10);
  made().fill<uint64_t>(7, 0, kMostShares - 5000, filled);
  made().fill<uint64_t>(7, 0, kMostShares - 5, piece);
  EXPECT_TRUE(std::equal(piece.begin(), piece.end(), filled.begin() + 4995));
}

// Each rank's batches, by parts of any length, are those of the whole epoch.
void check_parts(const JobSpec& spec, uint32_t epoch, uint64_t most) {
  const uint64_t batches = batches_in(spec, epoch);
  for (uint32_t rank = 0; rank < spec.world; ++rank) {
    const RankEpoch whole = rank_epoch(spec, epoch, rank);
    ASSERT_EQ(whole.batch_ends.size(), batches);
    uint64_t done = 0;
    for (uint64_t first = 0; first < batches; first += most) {
      const uint64_t end = std::min(batches, first + most);
      const RankEpoch part = rank_batches(spec, epoch, rank, first, end);
      ASSERT_EQ(part.batch_ends.size(), end - first);
      for (uint64_t h = first; h < end; ++h) {
        ASSERT_EQ(done + part.batch_ends[h - first], whole.batch_ends[h]);
      }
      ASSERT_TRUE(part.occurrences.empty() || part.occurrences.size() == part.samples.size());
      for (size_t i = 0; i < part.samples.size(); ++i) {
        ASSERT_EQ(part.samples[i], whole.samples[done + i]);
        const uint32_t expected = whole.occurrences.empty() ? 0 : whole.occurrences[done + i];
        ASSERT_EQ(part.occurrences.empty() ? 0 : part.occurrences[i], expected);
      }
      done += part.samples.size();
    }
    ASSERT_EQ(done, whole.samples.size());
  }
}

TEST(Plan, HasTheSameBatchesByPartsAsByEpochs) {
  SampleRandom random(5, 0, 0);
  constexpr OrderKind kKinds[] = {OrderKind::mixture, OrderKind::keyed, OrderKind::sequential,
                                  OrderKind::torch, OrderKind::weighted};
  constexpr AtEnd kEnds[] = {AtEnd::repeat, AtEnd::stop, AtEnd::reweight};
  for (uint32_t round = 0; round < 200; ++round) {
    JobSpec spec;
    spec.order = kKinds[round % 5];
    spec.world = 1 + random.below(5);
    spec.order_world = 1 + random.below(7);
    spec.global_batch = spec.world * (1 + random.below(6));
    spec.scheme = Scheme(random.below(3));
    spec.drop_last = random.below(2) == 1;
    spec.epochs = 4;
    spec.seed = round;
    spec.samples = 1 + random.below(300);
    spec.draws = 1 + random.below(400);
    if (spec.order == OrderKind::weighted) {
      spec.weights = std::make_shared<const Weights>(spec.samples, 1.0);
    } else if (spec.order == OrderKind::mixture) {
      Mixture::Spec of{{1 + random.below(90), 1 + random.below(9), 1 + random.below(200)}, {}, {}};
      of.changes = {{0, {0.5, 1, std::sqrt(3.0)}}, {31, {1, 0.25, 0}}};
      of.at_end = kEnds[random.below(3)];
      spec.samples = std::accumulate(of.samples.begin(), of.samples.end(), uint64_t{0});
      spec.mixture = std::make_shared<const Mixture>(of);
    }
    validate(spec);
    if (random.below(3) == 0) spec.steps = 1 + random.below(40);
    for (uint32_t epoch = 0; epoch < 3; ++epoch) {
      if (batches_in(spec, epoch) > 0) check_parts(spec, epoch, 1 + random.below(20));
    }
  }
}

// A job that goes on works out the pattern up to its place, once, and no epoch.
TEST(Plan, WorksOutNoMoreOfAMixtureThanItsBatchesNeed) {
  JobSpec spec = mixed_job(4, uint64_t{1} << 50);
  const Weights irrational{std::sqrt(2.0), 1.0};
  const auto made = [&] {
    return std::make_shared<const Mixture>(
        Mixture::Spec{{10, 100}, {{0, irrational}}, AtEnd::repeat});
  };
  const auto batch_of = [&](uint64_t batch) {
    Ids ids;
    for (uint32_t rank = 0; rank < spec.world; ++rank) {
      const RankEpoch part = rank_batches(spec, 2, rank, batch, batch + 1);
      ids.insert(ids.end(), part.samples.begin(), part.samples.end());
    }
    return ids;
  };
  constexpr uint64_t kPart = kMostSources;
  const uint64_t length = epoch_length(spec), far = length / spec.global_batch - 5;
  for (const uint64_t batch : {uint64_t{0}, uint64_t{30'000}, far}) {
    spec.mixture = made();
    const uint64_t place = (2 * length + batch * spec.global_batch) % kMostShares;
    const Ids once = batch_of(batch);
    EXPECT_LE(spec.mixture->worked_out(), place + 2 * kPart);
    const uint64_t before = spec.mixture->worked_out();
    // The batches behind it go on from there.
    for (uint64_t next = 1; next <= 4; ++next) batch_of(batch + next);
    EXPECT_LE(spec.mixture->worked_out(), before + kPart);
    spec.world = 1;
    Ids alone = batch_of(batch), sorted = once;
    std::sort(alone.begin(), alone.end());
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(alone, sorted);
    spec.world = 4;
  }
}

TEST(Plan, WorksOutAMixtureThatChangesWithinAnEpochOnce) {
  JobSpec spec = mixed_job(4, uint64_t{1} << 50);
  const uint64_t length = epoch_length(spec);
  const Weights irrational{std::sqrt(2.0), 1.0}, then{1.0, std::sqrt(3.0)};
  spec.mixture = std::make_shared<const Mixture>(
      Mixture::Spec{{10, 100}, {{0, irrational}, {2 * length + length / 2, then}}, AtEnd::repeat});
  const uint64_t first = length / 2 / spec.global_batch + 100;
  rank_batches(spec, 2, 0, first, first + 1);
  const uint64_t before = spec.mixture->worked_out();
  for (uint64_t next = 1; next <= 8; ++next) {
    rank_batches(spec, 2, 0, first + next, first + next + 1);
  }
  EXPECT_LE(spec.mixture->worked_out(), before + kMostSources);
}

TEST(BucketedOrder, HasBatchesOfOneBucket) {
  const JobSpec spec = bucketed_job();
  validate(spec);
  std::set<Ids> seen;
  for (uint32_t epoch = 0; epoch < 3; ++epoch) {
    const Ids order = epoch_order(spec, epoch);
    ASSERT_EQ(order.size(), 1004u);
    Ids sorted(order.begin(), order.begin() + 1003);
    std::sort(sorted.begin(), sorted.end());
    for (uint64_t i = 0; i < 1003; ++i) ASSERT_EQ(sorted[i], i);
    uint64_t mixed = 0;
    std::vector<uint32_t> kinds;
    for (uint64_t h = 0; h < 1003 / 8; ++h) {
      std::set<uint32_t> of;
      for (uint64_t p = h * 8; p < h * 8 + 8; ++p) of.insert((*spec.buckets)[order[p]]);
      mixed += of.size() > 1;
      if (of.size() == 1) kinds.push_back(*of.begin());
    }
    EXPECT_LT(mixed, 4u);  // buckets 0, 1, 2 and 4 leave less than a batch each
    EXPECT_FALSE(std::is_sorted(kinds.begin(), kinds.end()));
    seen.insert(order);
  }
  EXPECT_EQ(seen.size(), 3u);
}

TEST(BucketedOrder, NeedsABucketForEachSample) {
  JobSpec spec = bucketed_job();
  spec.samples = 1004;
  EXPECT_THROW(validate(spec), Error);
  spec = bucketed_job();
  spec.buckets = nullptr;
  EXPECT_THROW(validate(spec), Error);
  spec.samples = 1;
  spec.buckets = std::make_shared<const std::vector<uint32_t>>(1, kMostSources);
  EXPECT_THROW(validate(spec), Error);
}

// docs/formats/order.md
TEST(BucketedOrder, IsTheGoldenOne) {
  JobSpec spec = bucketed_job();
  spec.samples = 14;
  spec.global_batch = 3;
  spec.world = 1;
  spec.buckets = std::make_shared<const std::vector<uint32_t>>(
      std::vector<uint32_t>{0, 1, 0, 2, 1, 0, 0, 2, 2, 1, 0, 1, 0, 2});
  EXPECT_EQ(epoch_order(spec, 1), (Ids{1, 4, 11, 8, 7, 3, 5, 2, 6, 10, 0, 12, 9, 13}));
}

}  // namespace
}  // namespace nostall::plan
