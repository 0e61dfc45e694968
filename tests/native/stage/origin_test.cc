// Which origin is chosen for a sample, and how the estimates of speeds follow measurements.
#include "stage/origin.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstring>
#include <thread>

#include "../forked.h"
#include "stage/buffer.h"

namespace nostall::stage {
namespace {

TEST(Choose, TakesTheRamTierWhateverTheSpeeds) {
  EXPECT_EQ(choose({Candidate{true, 1.0}, {true, 1e-9}, {true, 1e-9}, {true, 1e-9}}).origin,
            Origin::ram);
}

TEST(Choose, GoesToTheSourceWhenNoTierHasIt) {
  EXPECT_EQ(choose({Candidate{}, {}, {}, {true, 1.0}}).origin, Origin::source);
}

TEST(Choose, TrustsATierThatWasNeverMeasured) {
  EXPECT_EQ(choose({Candidate{}, {true, 0.0}, {}, {true, 1e-9}}).origin, Origin::file);
  EXPECT_EQ(choose({Candidate{}, {true, 1e-6}, {}, {true, 0.0}}).origin, Origin::file);
}

TEST(Choose, LeavesAFileTierOnlyForAClearlyFasterSource) {
  EXPECT_EQ(choose({Candidate{}, {true, 1.9e-9}, {}, {true, 1e-9}}).origin, Origin::file);
  EXPECT_EQ(choose({Candidate{}, {true, 2.1e-9}, {}, {true, 1e-9}}).origin, Origin::source);
}

TEST(Choose, PrefersTheFasterOfFileTierAndPeer) {
  EXPECT_EQ(choose({Candidate{}, {true, 2e-9}, {true, 1e-9}, {true, 9e-9}}).origin, Origin::peer);
  EXPECT_EQ(choose({Candidate{}, {true, 1e-9}, {true, 2e-9}, {true, 9e-9}}).origin, Origin::file);
  EXPECT_EQ(choose({Candidate{}, {true, 0.0}, {true, 1e-9}, {true, 9e-9}}).origin, Origin::file);
}

TEST(Choose, TriesANodeThatWasNeverMeasuredOnceItsOwnTierIs) {
  const Choice choice = choose({Candidate{}, {true, 2e-9}, {true, 0.0}, {true, 9e-9}});
  EXPECT_EQ(choice.origin, Origin::peer);
  EXPECT_EQ(choice.reason, Reason::unmeasured);
  EXPECT_EQ(choose({Candidate{}, {true, 0.0}, {true, 0.0}, {true, 9e-9}}).origin, Origin::file);
}

TEST(Choose, SaysWhy) {
  EXPECT_EQ(choose({Candidate{true, 0.0}, {}, {}, {true, 1e-9}}).reason, Reason::in_memory);
  EXPECT_EQ(choose({Candidate{}, {}, {}, {true, 1e-9}}).reason, Reason::only);
  EXPECT_EQ(choose({Candidate{}, {true, 1e-9}, {true, 2e-9}, {true, 9e-9}}).reason,
            Reason::nearest);
  EXPECT_EQ(choose({Candidate{}, {true, 2e-9}, {true, 1e-9}, {true, 9e-9}}).reason,
            Reason::faster_peer);
  EXPECT_EQ(choose({Candidate{}, {true, 9e-9}, {true, 9e-9}, {true, 1e-9}}).reason,
            Reason::faster_source);
}

TEST(Choose, LeavesAPeerOnlyForAClearlyFasterSource) {
  EXPECT_EQ(choose({Candidate{}, {}, {true, 0.0}, {true, 1e-9}}).origin, Origin::peer);
  EXPECT_EQ(choose({Candidate{}, {}, {true, 7.9e-9}, {true, 1e-9}}).origin, Origin::peer);
  EXPECT_EQ(choose({Candidate{}, {}, {true, 8.1e-9}, {true, 1e-9}}).origin, Origin::source);
}

TEST(WorthPushing, OnlyWhereTheNetworkIsNoSlowerThanTheSource) {
  EXPECT_TRUE(worth_pushing(0.0, 1e-9));
  EXPECT_TRUE(worth_pushing(1e-9, 0.0));
  EXPECT_TRUE(worth_pushing(1e-9, 1e-9));
  EXPECT_FALSE(worth_pushing(9e-9, 1e-9));
}

TEST(SpeedEstimate, IsStaleOnceInAWhile) {
  SpeedEstimate estimate;
  EXPECT_FALSE(estimate.stale(0));
  estimate.record(1000, 1000);
  EXPECT_FALSE(estimate.stale(60'000'000'000));
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_TRUE(estimate.stale(1'000'000));
  EXPECT_FALSE(estimate.stale(60'000'000'000));
}

TEST(SpeedEstimate, FollowsAFileSystemThatSlowsDown) {
  SpeedEstimate estimate;
  EXPECT_EQ(estimate.seconds_per_byte(), 0.0);
  for (int i = 0; i < 2; ++i) estimate.record(1000, 1000);  // 1 ns a byte
  EXPECT_DOUBLE_EQ(estimate.seconds_per_byte(), 1e-9);
  for (int i = 0; i < 200; ++i) estimate.record(1000, 10000);
  EXPECT_NEAR(estimate.seconds_per_byte(), 1e-8, 1e-10);
  estimate.record(0, 5);
  estimate.record(5, 0);
  EXPECT_NEAR(estimate.seconds_per_byte(), 1e-8, 1e-10);
}

TEST(SpeedEstimate, TheFirstMeasurementSaysNothingByItself) {
  SpeedEstimate stalled, expected;
  stalled.record(1000, 300'000'000);  // its process was not running
  EXPECT_EQ(stalled.seconds_per_byte(), 0.0);
  stalled.record(1000, 1000);
  EXPECT_DOUBLE_EQ(stalled.seconds_per_byte(), 1e-9);
  expected.expect(5e-9);
  expected.record(1000, 1000);
  EXPECT_DOUBLE_EQ(expected.seconds_per_byte(), 5e-9);
  expected.record(1000, 300'000'000);
  EXPECT_DOUBLE_EQ(expected.seconds_per_byte(), 1e-9);
}

TEST(SpeedEstimate, OneStallSaysLittle) {
  const auto origin_after = [](int stalls) {
    SpeedEstimate peer;
    for (int i = 0; i < 20; ++i) peer.record(1000, 1000);
    for (int i = 0; i < stalls; ++i) peer.record(1000, 300'000'000);  // its process was not running
    return choose({Candidate{}, {}, {true, peer.seconds_per_byte()}, {true, 1e-9}}).origin;
  };
  // Where this process is not running before the stall is recorded, that is the newest by far.
  bool says_little = false;
  for (int attempt = 0; attempt < 20 && !says_little; ++attempt) {
    says_little = origin_after(1) == Origin::peer;
  }
  EXPECT_TRUE(says_little);
  EXPECT_EQ(origin_after(9), Origin::source);
}

TEST(BufferPool, ReusesWhatComesBackAndOutlivesItsOwner) {
  std::shared_ptr<Buffer> held;
  {
    const auto pool = std::make_shared<BufferPool>(2000);
    const std::byte* first = pool->take(1000)->data();
    const auto again = pool->take(900);
    EXPECT_EQ(again->data(), first);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(again->data()) % 64, 0u);
    EXPECT_EQ(pool->bytes(), 1000u);
    held = pool->take(64);
    EXPECT_EQ(pool->bytes(), 1064u);
  }
  std::memset(held->data(), 1, 64);
}

TEST(BufferPool, GivesWhatWasUsedLast) {
  // Of those that this processor used.
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(::sched_getcpu(), &here);
  ASSERT_EQ(::sched_setaffinity(0, sizeof here, &here), 0);
  const auto pool = std::make_shared<BufferPool>(2000);
  auto first = pool->take(1000), second = pool->take(1000);
  const std::byte* const last = second->data();
  first.reset();
  second.reset();
  EXPECT_EQ(pool->take(1000)->data(), last);
}

// As of a batch that a worker inherits: another thread may be at the pool just then.
TEST(BufferPool, AForkedChildDropsWhatItHas) {
  const auto pool = std::make_shared<BufferPool>(2000);
  std::jthread user([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) pool->take(10);
  });
  for (int i = 0; i < 50; ++i) {
    auto buffer = pool->take(1000);
    ASSERT_EQ(status_of_child([&] {
                buffer.reset();
                return 0;
              }),
              0)
        << i;
  }
}

TEST(BufferPool, DoesNotPinALargeBufferForAFewBytes) {
  const auto pool = std::make_shared<BufferPool>(10'000'000);
  { const auto large = pool->take(8'000'000); }
  EXPECT_LT(pool->take(1000)->capacity(), 100'000u);
  EXPECT_EQ(pool->take(6'000'000)->capacity(), 8'000'000u);
}

TEST(BufferPool, KeepsNoMoreFreeBytesThanItWasTold) {
  const auto pool = std::make_shared<BufferPool>(50);
  {
    const auto a = pool->take(10), b = pool->take(20), c = pool->take(30);
    EXPECT_EQ(pool->bytes(), 60u);
  }
  EXPECT_LE(pool->bytes(), 50u);
  EXPECT_GT(pool->bytes(), 0u);
}

TEST(BufferPool, ServesManyThreads) {
  const auto pool = std::make_shared<BufferPool>(200);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 500; ++i) {
        const auto buffer = pool->take(static_cast<size_t>(64 + i % 7));
        std::memset(buffer->data(), t, 64);
        for (size_t k = 0; k < 64; ++k) ASSERT_EQ(buffer->data()[k], std::byte(t));
      }
    });
  }
}

}  // namespace
}  // namespace nostall::stage
