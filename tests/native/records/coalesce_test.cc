// Which pieces are read together, and what the storage was seen to cost.
#include "records/coalesce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace nostall::records {
namespace {

TEST(Coalesce, JoinsWhatLiesCloseTogether) {
  std::vector<Piece> pieces = {
      {0, 1000, 100, 0}, {0, 0, 100, 1}, {1, 200, 50, 2}, {0, 100, 100, 3}, {0, 250, 50, 4}};
  const auto together = coalesce(pieces, {50, 1000});
  ASSERT_EQ(together.size(), 3u);
  EXPECT_EQ(together[0].offset, 0u);
  EXPECT_EQ(together[0].length, 300u);
  EXPECT_EQ(together[0].count, 3u);
  EXPECT_EQ(pieces[together[0].first + 1].index, 3u);
  EXPECT_EQ(together[1].offset, 1000u);
  EXPECT_EQ(together[2].file, 1u);
  pieces.clear();
  EXPECT_TRUE(coalesce(pieces, {50, 1000}).empty());
}

TEST(Coalesce, ReadsEveryPieceOnceWithinTheLimits) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 300; ++round) {
    const CoalesceLimits limits{random() % 200, 1 + random() % 3000};
    std::vector<Piece> pieces(random() % 60);
    for (uint32_t i = 0; i < pieces.size(); ++i) {
      pieces[i] = {static_cast<uint32_t>(random() % 3), random() % 5000, random() % 400, i};
    }
    const auto together = coalesce(pieces, limits);
    size_t next = 0;
    for (size_t k = 0; k < together.size(); ++k) {
      const Together& t = together[k];
      ASSERT_EQ(t.first, next);
      ASSERT_GE(t.count, 1u);
      next += t.count;
      uint64_t end = t.offset;
      for (size_t i = t.first; i < next; ++i) {
        ASSERT_EQ(pieces[i].file, t.file);
        ASSERT_GE(pieces[i].offset, t.offset);
        ASSERT_TRUE(pieces[i].offset <= end || pieces[i].offset - end <= limits.gap);
        end = std::max(end, pieces[i].offset + pieces[i].length);
      }
      ASSERT_EQ(end, t.offset + t.length);
      ASSERT_TRUE(t.length <= limits.bytes || t.count == 1);
      if (k == 0 || together[k - 1].file != t.file) continue;
      // Nothing was cut that could have stayed together.
      const Together& last = together[k - 1];
      const Piece& p = pieces[t.first];
      const uint64_t last_end = last.offset + last.length;
      const bool near = p.offset <= last_end || p.offset - last_end <= limits.gap;
      ASSERT_FALSE(near && std::max(last_end, p.offset + p.length) - last.offset <= limits.bytes);
    }
    ASSERT_EQ(next, pieces.size());
  }
}

struct Device {
  double operation, byte;
};

class Costs : public testing::TestWithParam<Device> {};

TEST_P(Costs, AreFoundFromMixedReads) {
  const auto [operation, byte] = GetParam();
  std::mt19937 random(5);
  std::uniform_real_distribution<double> noise(0.9, 1.1);
  StorageCost cost;
  for (int i = 0; i < 300; ++i) {
    const double operations = 1 + random() % 32;
    const double bytes = operations * (i % 2 ? 3000 : 500'000);
    cost.record(operations, bytes, (operations * operation + bytes * byte) * noise(random));
  }
  EXPECT_NEAR(cost.seconds_per_operation() / operation, 1.0, 0.15);
  EXPECT_NEAR(cost.seconds_per_byte() / byte, 1.0, 0.15);
  const double even = operation / byte;
  const CoalesceLimits limits = cost.limits(uint64_t{1} << 40);
  EXPECT_NEAR(static_cast<double>(limits.gap), std::min(even, 1048576.0), 0.3 * even);
  EXPECT_NEAR(static_cast<double>(limits.bytes), std::max(65536.0, 9 * even), 0.3 * 9 * even);
}

// From reads of one size no fit can tell operations from bytes; whatever it makes of the noise, a
// record must not cost many times its bytes.
TEST(CostsOfOneSize, LeadToNoLargeGaps) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> noise(0.5, 1.5);
  for (const double size : {4096.0, 8192.0, 1e6}) {
    for (int device = 0; device < 50; ++device) {
      StorageCost cost;
      EXPECT_LE(cost.limits(4 << 20, 3000).gap, 4096u);
      for (int i = 0; i < 40; ++i) {
        const double operations = 1 + random() % 32;
        cost.record(operations, operations * size,
                    operations * (0.5e-3 + size / 66e6) * noise(random));
        EXPECT_LE(cost.limits(4 << 20, 3000).gap, 4096u);
      }
    }
  }
}

TEST(CostsOfSeveralSizes, AreTrusted) {
  StorageCost cost;
  for (int i = 0; i < 40; ++i) {
    const double size = i % 2 ? 4096 : 1e6;
    cost.record(1, size, 0.5e-3 + size / 66e6);
  }
  EXPECT_NEAR(static_cast<double>(cost.limits(4 << 20, 3000).gap), 33e3, 3e3);
}

INSTANTIATE_TEST_SUITE_P(All, Costs,
                         testing::Values(Device{60e-6, 1 / 1.5e9}, Device{0.5e-3, 1 / 66e6},
                                         Device{30e-3, 1 / 100e6}, Device{2e-6, 1 / 5e9}));

TEST(StorageCost, FollowsADeviceThatBecomesSlower) {
  StorageCost cost;
  const auto use = [&](double operation, double byte) {
    for (int i = 0; i < 200; ++i) {
      const double bytes = i % 2 ? 4000 : 1'000'000;
      cost.record(1, bytes, operation + bytes * byte);
    }
  };
  use(60e-6, 1e-9);
  use(2e-3, 1e-8);
  EXPECT_NEAR(cost.seconds_per_operation(), 2e-3, 3e-4);
  EXPECT_NEAR(cost.seconds_per_byte(), 1e-8, 1.5e-9);
}

TEST(StorageCost, PredictsReadsThatWereAllAlike) {
  StorageCost cost;
  for (int i = 0; i < 100; ++i) cost.record(16, 16 * 110e3, 5e-3);
  EXPECT_NEAR(16 * cost.seconds_per_operation() + 16 * 110e3 * cost.seconds_per_byte(), 5e-3,
              0.05 * 5e-3);
  EXPECT_GT(cost.seconds_per_operation(), 0.0);
  EXPECT_GT(cost.seconds_per_byte(), 0.0);
}

TEST(StorageCost, StaysSensibleWhateverIsMeasured) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinite = std::numeric_limits<double>::infinity();
  const double values[] = {nan,  -infinite, -1.0, 0.0,  1e-300, 1e-9,
                           1e-3, 1.0,       1e6,  1e18, 1e300,  infinite};
  for (const double o : values) {
    for (const double b : values) {
      for (const double s : values) {
        StorageCost cost;
        cost.record(o, b, s);
        cost.record(4, 400e3, 1e-3);
        cost.record(4, 4e3, 1e-4);
        EXPECT_GE(cost.seconds_per_operation(), 0.0) << o << " " << b << " " << s;
        EXPECT_GT(cost.seconds_per_byte(), 0.0) << o << " " << b << " " << s;
        EXPECT_TRUE(std::isfinite(cost.seconds_per_operation()));
        EXPECT_TRUE(std::isfinite(cost.seconds_per_byte()));
        for (const uint64_t most : {uint64_t{0}, uint64_t{1000}, uint64_t{4} << 20}) {
          const CoalesceLimits limits = cost.limits(most);
          EXPECT_LE(limits.bytes, most);
          EXPECT_GE(limits.bytes, std::min<uint64_t>(most, 65536));
          EXPECT_LE(limits.gap, 1u << 20);
        }
      }
    }
  }
}

TEST(StorageCost, FallsBackToOneCostWhereTheOtherCannotBeSeen) {
  StorageCost only_bytes, only_operations;
  for (int i = 1; i < 100; ++i) {
    // More operations that took less time: noise, not a negative cost.
    only_bytes.record(i, 1e6 * i, 1e-3 * i * (i % 2 ? 1.3 : 0.7));
    only_operations.record(i, i % 2 ? 1e3 * i : 1e6 * i, (i % 2 ? 1.2e-3 : 1e-3) * i);
  }
  EXPECT_GE(only_bytes.seconds_per_operation(), 0.0);
  EXPECT_GT(only_operations.seconds_per_byte(), 0.0);
  EXPECT_NEAR(only_operations.seconds_per_operation(), 1.1e-3, 2e-4);
}

}  // namespace
}  // namespace nostall::records
