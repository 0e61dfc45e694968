// Exchanges over UCX.
#include "peer/exchange.h"

#include <gmock/gmock.h>

#include <array>

#include "nodes.h"

namespace nostall::peer {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class ExchangeTest : public Nodes {
 protected:
  struct Member {
    std::shared_ptr<tier::NodeCache> cache;
    std::unique_ptr<Exchange> exchange;
  };

  std::vector<Member> start(uint32_t nodes, tier::TierKind kind = tier::TierKind::ram,
                            std::vector<std::string> secrets = {}) {
    std::vector<Member> members(nodes);
    std::vector<std::unique_ptr<Transport>> transports;
    ExchangeConfig config;
    for (uint32_t n = 0; n < nodes; ++n) {
      transports.push_back(load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""}));
      config.addresses.push_back(transports.back()->address());
      config.node_of_rank.push_back(n);
    }
    config.plan = 77;
    config.epoch_length = kSamples;
    // A node with another secret is lost by its silence; others are to have as long as they need.
    config.timeout = secrets.empty() ? 60s : 500ms;
    for (uint32_t n = 0; n < nodes; ++n) {
      config.rank = n;
      config.secret = n < secrets.size() ? secrets[n] : "a secret of sixteen bytes";
      members[n].cache = cache_of(n, kind);
      members[n].exchange = std::make_unique<Exchange>(std::move(transports[n]), config,
                                                       ownership(nodes), sizes_, members[n].cache);
    }
    return members;
  }
};

TEST_F(ExchangeTest, PushedSamplesAreThereAndCanBeFetched) {
  for (const tier::TierKind kind : {tier::TierKind::ram, tier::TierKind::file}) {
    auto members = start(3, kind);
    for (uint64_t s = 0; s < kSamples; ++s) {
      Exchange& reader = *members[(s + 1) % 3].exchange;
      // Until its owner is heard it might have been kept from an earlier job.
      EXPECT_TRUE(eventually([&] { return reader.where(s, 0) == Where::source; }));
      EXPECT_EQ(reader.where(s, 1), Where::awaited);
      EXPECT_TRUE(reader.push_wanted(s));
      EXPECT_EQ(members[s % 3].exchange->where(s, 1), Where::awaited);
      auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(s));
      ASSERT_TRUE(reader.push(s, *bytes, bytes, {}));
    }
    for (uint64_t s = 0; s < kSamples; ++s) {
      Exchange& asking = *members[(s + 2) % 3].exchange;
      ASSERT_TRUE(eventually([&] { return asking.where(s, 1) == Where::there; })) << s;
      std::vector<std::byte> into;
      ASSERT_EQ(fetch(asking, s, into), Outcome::here);
      EXPECT_EQ(into, bytes_of(s));
    }
    uint64_t fetched = 0, too_early = 0, refused = 0;
    for (const Member& m : members) {
      const ExchangeStats stats = m.exchange->stats();
      fetched += stats.fetched;
      too_early += stats.asked_too_early;
      refused += stats.refused;
    }
    EXPECT_EQ(fetched, kSamples);
    EXPECT_EQ(too_early, 0u);
    EXPECT_EQ(refused, 0u);
  }
  EXPECT_TRUE(warnings_.empty()) << warnings_[0];
}

TEST_F(ExchangeTest, WhatChangedInAnOwnersTierIsNotSent) {
  auto members = start(2);
  const std::array<uint64_t, 2> samples{0, 2};
  for (const uint64_t s : samples) {
    auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(s));
    ASSERT_TRUE(eventually([&] { return members[1].exchange->where(s, 0) == Where::source; }));
    ASSERT_TRUE(members[1].exchange->push(s, *bytes, bytes, {}));
    ASSERT_TRUE(eventually([&] { return members[0].cache->state(s) == tier::State::ready; }));
  }
  const_cast<std::byte*>(members[0].cache->ram_view(0).bytes().data())[9] ^= std::byte{1};
  std::vector<std::byte> into;
  EXPECT_EQ(fetch(*members[1].exchange, 0, into), Outcome::never);
  EXPECT_EQ(members[0].cache->state(0), tier::State::failed);
  EXPECT_EQ(fetch(*members[1].exchange, 2, into), Outcome::here);
  EXPECT_EQ(into, bytes_of(2));
  // Nor is a push taken that is of another content than the one that its owner knows.
  members[0].cache->sums().agrees(4, 12345);
  auto other = std::make_shared<std::vector<std::byte>>(bytes_of(4));
  EXPECT_TRUE(members[1].exchange->push(4, *other, other, {}));
  auto good = std::make_shared<std::vector<std::byte>>(bytes_of(6));
  EXPECT_TRUE(members[1].exchange->push(6, *good, good, {}));
  ASSERT_TRUE(eventually([&] { return members[0].cache->state(6) == tier::State::ready; }));
  EXPECT_EQ(members[0].cache->state(4), tier::State::empty);
}

TEST_F(ExchangeTest, WhatChangedSinceItWasReadIsNotPushed) {
  auto members = start(2);
  ASSERT_TRUE(eventually([&] { return members[1].exchange->where(0, 0) == Where::source; }));
  auto changed = std::make_shared<std::vector<std::byte>>(bytes_of(0));
  EXPECT_TRUE(members[1].cache->sums().agrees(0, sample_sum(*changed)));
  (*changed)[7] ^= std::byte{1};
  ASSERT_TRUE(members[1].exchange->push(0, *changed, changed, {}));
  auto good = std::make_shared<std::vector<std::byte>>(bytes_of(2));
  ASSERT_TRUE(members[1].exchange->push(2, *good, good, {}));
  ASSERT_TRUE(eventually([&] { return members[0].cache->state(2) == tier::State::ready; }));
  EXPECT_EQ(members[0].cache->state(0), tier::State::empty);
  EXPECT_EQ(members[1].exchange->stats().pushes_given_up, 1u);
  EXPECT_EQ(members[0].exchange->stats().dropped_ranks, 0u);
}

// A session refuses what more than 4,096 later messages have overtaken.
TEST_F(ExchangeTest, ALargePayloadIsTakenBeforeWhatComesLongAfterIt) {
  constexpr int kMany = 6000;
  struct Counting : Receiver {
    Delivery on_message(std::span<const std::byte>, uint64_t payload) override {
      if (payload > 0) before = messages;
      ++messages;
      return {};
    }
    void on_gone(uint32_t, const std::string& why) override { ADD_FAILURE() << why; }
    int messages = 0, before = -1;
  } received, none;
  const std::vector<std::byte> large(1 << 20);
  const auto to = load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""});
  const auto from = load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""});
  from->connect(1, to->address());
  from->send(1, {}, {}, nullptr);
  ASSERT_TRUE(eventually([&] {
    from->progress(none);
    to->progress(received);
    return received.messages == 1;
  }));
  from->send(1, {}, large, nullptr);
  for (int i = 0; i < kMany; ++i) from->send(1, {}, {}, nullptr);
  while (from->progress(none)) {
  }
  EXPECT_TRUE(eventually([&] {
    from->progress(none);
    to->progress(received);
    return received.messages == kMany + 2;
  }));
  EXPECT_GT(received.before, 0);
  EXPECT_LT(received.before, 4096);
}

// Payloads that are offered are on their way when the connections close.
TEST_F(ExchangeTest, ATransportThatEndsHearsNoMessageAndEndsWhatItSends) {
  struct Counting : Receiver {
    Delivery on_message(std::span<const std::byte>, uint64_t) override {
      ++messages;
      return {};
    }
    void on_gone(uint32_t, const std::string&) override {}
    int messages = 0;
  } received, none;
  constexpr int kSends = 100;
  int ended = 0, answered = 0;
  const std::vector<std::byte> large(1 << 20);
  auto to = load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""});
  auto from = load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""});
  const auto other = load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""});
  from->connect(1, to->address());
  to->connect(2, other->address());
  from->send(1, {}, {}, nullptr);
  to->send(2, {}, {}, nullptr);
  ASSERT_TRUE(eventually([&] {
    from->progress(none);
    other->progress(none);
    to->progress(received);
    return received.messages == 1 && none.messages == 1;
  }));
  to->send(2, {}, large, [&](bool) { ++answered; });
  for (int i = 0; i < kSends; ++i) {
    from->send(1, {}, i % 10 == 0 ? large : std::span<const std::byte>{}, [&](bool) { ++ended; });
  }
  while (from->progress(none)) {
  }
  to.reset();
  EXPECT_EQ(answered, 1);
  EXPECT_EQ(received.messages, 1);
  EXPECT_LT(ended, kSends);
  from.reset();
  EXPECT_EQ(ended, kSends);
}

TEST_F(ExchangeTest, ARankOnANodeThatTheJobDoesNotHaveIsRefused) {
  ExchangeConfig config;
  config.addresses = {"", ""};
  config.node_of_rank = {0, 2};
  config.secret = "a secret of sixteen bytes";
  try {
    const Exchange exchange(load_ucx(NOSTALL_UCX_LIBRARY, {"tcp", ""}), config, ownership(2),
                            sizes_, cache_of(0, tier::TierKind::ram));
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("rank 1 is on node 2 of a smaller job"));
  }
}

TEST_F(ExchangeTest, AWrongSecretGetsNothing) {
  auto members = start(2, tier::TierKind::ram, {"the job's own secret", "another job's secret"});
  put(*members[0].cache, 0);
  std::vector<std::byte> into;
  EXPECT_EQ(fetch(*members[1].exchange, 0, into), Outcome::failed);
  EXPECT_EQ(into, std::vector<std::byte>(sizes_[0]));
  EXPECT_EQ(members[0].exchange->stats().served, 0u);
  EXPECT_TRUE(eventually([&] {
    return members[1].exchange->stats().refused + members[0].exchange->stats().refused > 0;
  }));
  const auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(2));
  members[1].exchange->push(2, *bytes, bytes, {});
  ASSERT_TRUE(eventually([&] { return members[1].exchange->nodes_alive() == 1; }));
  EXPECT_FALSE(members[1].exchange->push(2, *bytes, bytes, {}));
  EXPECT_EQ(members[1].exchange->stats().pushed, 0u);
  EXPECT_EQ(members[0].cache->state(2), tier::State::empty);
}

TEST_F(ExchangeTest, ANodeThatLeavesIsNotAskedAgain) {
  auto members = start(2);
  put(*members[0].cache, 0);
  std::vector<std::byte> into;
  ASSERT_TRUE(eventually([&] { return members[1].exchange->where(0, 1) == Where::there; }));
  ASSERT_EQ(fetch(*members[1].exchange, 0, into), Outcome::here);
  members[0].exchange.reset();
  ASSERT_TRUE(eventually([&] { return members[1].exchange->where(0, 1) == Where::source; }));
  EXPECT_EQ(fetch(*members[1].exchange, 0, into), Outcome::failed);
  EXPECT_EQ(members[1].exchange->nodes_alive(), 1u);
  EXPECT_TRUE(warnings_.empty()) << warnings_[0];
}

TEST_F(ExchangeTest, WhatTheOwnerLacksIsAnsweredAtOnce) {
  auto members = start(2);
  std::vector<std::byte> into;
  ASSERT_TRUE(eventually([&] { return members[1].exchange->nodes_alive() == 2; }));
  EXPECT_EQ(fetch(*members[1].exchange, 2, into), Outcome::not_yet);
  EXPECT_EQ(members[1].exchange->stats().asked_too_early, 1u);
}

}  // namespace
}  // namespace nostall::peer
