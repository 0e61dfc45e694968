// Peers that are not what they say, or do not keep to the rules.
#include "hostile.h"

namespace nostall::peer {
namespace {

using testing::Contains;
using testing::HasSubstr;

TEST_F(HostileTest, WhoKnowsTheSecretIsServed) {
  start();
  put(*cache_, 1);
  Session session = served();
  Header fetch = message(Kind::fetch, 1);
  wire_->say(session.seal(fetch));
  const Header reply = wire_->hear(Kind::reply);
  EXPECT_TRUE(session.open(reply));
  EXPECT_EQ(reply.status, Status::here);
  EXPECT_EQ(wire_->payload(), bytes_of(1));
}

TEST_F(HostileTest, AStrangerReadsNothingAndWritesNothing) {
  start();
  put(*cache_, 1);
  Session session = asking("another secret, long enough");
  EXPECT_TRUE(refused(1));
  Header fetch = message(Kind::fetch, 1);
  wire_->say(session.seal(fetch));
  EXPECT_TRUE(refused(2));
  say_push(session, 3);
  EXPECT_TRUE(refused(3));
  EXPECT_EQ(exchange_->stats().served, 0u);
  EXPECT_EQ(cache_->state(3), tier::State::empty);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, RepeatedMessagesAreRefused) {
  start();
  put(*cache_, 1);
  Session session = served();
  Header fetch = message(Kind::fetch, 1);
  const HeaderBytes sealed = session.seal(fetch);
  wire_->say(sealed);
  wire_->hear(Kind::reply);
  wire_->say(sealed);
  EXPECT_TRUE(refused(1));
  EXPECT_EQ(exchange_->stats().served, 1u);
}

TEST_F(HostileTest, GarbageIsCountedAndHasNoEffect) {
  start();
  wire_->say(std::vector<std::byte>{});
  wire_->say(std::vector<std::byte>(kHeaderBytes));
  wire_->say(std::vector<std::byte>(kHeaderBytes + 1));
  HeaderBytes future = encode(message(Kind::fetch, 1));
  future[4] = std::byte{99};
  wire_->say(future);
  wire_->say(encode(message(Kind::fetch, 1)));  // no session
  Header elsewhere = message(Kind::fetch, 1);
  elsewhere.to = 5;
  wire_->say(encode(elsewhere));
  Header nobody = message(Kind::fetch, 1);
  nobody.from = 77;
  wire_->say(encode(nobody));
  wire_->say(encode(message(Kind::push, 1, 10)), std::vector<std::byte>(9));  // another length
  EXPECT_TRUE(refused(8));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, ARankWithAnotherPlanIsRefused) {
  start();
  Header hello = message(Kind::hello, 78);
  wire_->say(encode(hello));
  EXPECT_TRUE(refused(1));
  expect_warning("another plan");
}

TEST_F(HostileTest, AMemberThatAsksForTheImpossibleIsDropped) {
  start();
  Session session = served();
  Header fetch = message(Kind::fetch, kSamples);
  wire_->say(session.seal(fetch));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
}

TEST_F(HostileTest, APushOfWrongBytesIsDroppedAndLeavesTheSampleEmpty) {
  start();
  Session session = served();
  Header push = push_of(1);
  push.crc ^= 1;
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(cache_->state(1), tier::State::empty);
}

TEST_F(HostileTest, APushOfAnotherLengthIsDropped) {
  start();
  Session session = served();
  Header push = message(Kind::push, 1, 3);
  wire_->say(session.seal(push), std::vector<std::byte>(3));
  EXPECT_TRUE(dropped());
}

TEST_F(HostileTest, AFetchThatBringsBytesIsDropped) {
  start();
  put(*cache_, 1);
  Session session = served();
  Header fetch = message(Kind::fetch, 1, 10);
  wire_->say(session.seal(fetch), std::vector<std::byte>(10));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(exchange_->stats().served, 0u);
}

TEST_F(HostileTest, AFileThatCannotBeReadIsAnsweredByNever) {
  start(tier::TierKind::file);
  put(*cache_, 1);
  files_.errors["pread"] = EIO;
  Session session = served();
  Header fetch = message(Kind::fetch, 1);
  wire_->say(session.seal(fetch));
  EXPECT_EQ(wire_->hear(Kind::reply).status, Status::never);
  EXPECT_EQ(cache_->state(1), tier::State::failed);
  EXPECT_THAT(warnings(), Contains(HasSubstr("Input/output error")));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, AFileThatCannotBeWrittenCostsTheSampleAlone) {
  start(tier::TierKind::file);
  files_.errors["pwrite"] = EIO;
  Session session = served();
  say_push(session, 1);
  EXPECT_TRUE(eventually([&] { return cache_->state(1) == tier::State::failed; }));
  EXPECT_THAT(warnings(), Contains(HasSubstr("Input/output error; the sample is read from")));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, WhatAFileTierHasNoTimeForIsNotTaken) {
  arrange_ = [](ExchangeConfig& config, plan::Ownership&) { config.push_bytes = 700'000; };
  start(tier::TierKind::file);
  Session session = served();
  files_.held = true;
  for (const uint64_t sample : {3, 9, 15}) say_push(session, sample);
  EXPECT_TRUE(eventually([&] { return exchange_->stats().redundant == 1; }));
  EXPECT_EQ(cache_->state(3), tier::State::filling);
  EXPECT_EQ(cache_->state(9), tier::State::filling);
  EXPECT_EQ(cache_->state(15), tier::State::empty);
  files_.held = false;
  files_.held.notify_all();
  EXPECT_TRUE(eventually([&] { return exchange_->stats().received == 2; }));
  say_push(session, 15);
  EXPECT_TRUE(eventually([&] { return cache_->state(15) == tier::State::ready; }));
  EXPECT_TRUE(eventually([&] { return exchange_->stats().received == 3; }));
  EXPECT_EQ(exchange_->stats().redundant, 1u);
}

TEST_F(HostileTest, WhatDoesNotArriveTakesNoRoomBeforeAFileTier) {
  arrange_ = [](ExchangeConfig& config, plan::Ownership&) { config.push_bytes = 700'000; };
  start(tier::TierKind::file);
  Session session = served();
  wire_->torn = true;
  for (const uint64_t sample : {3, 9}) say_push(session, sample);
  wire_->settle();
  wire_->torn = false;
  files_.held = true;
  for (const uint64_t sample : {3, 9}) say_push(session, sample);
  wire_->settle();
  EXPECT_EQ(exchange_->stats().redundant, 0u);
  files_.held = false;
  files_.held.notify_all();
  EXPECT_TRUE(eventually([&] { return exchange_->stats().received == 2; }));
}

class TierTest : public HostileTest, public testing::WithParamInterface<tier::TierKind> {};

TEST_P(TierTest, APushThatDoesNotMatchItsChecksumLeavesTheSampleEmpty) {
  start(GetParam());
  Session session = served();
  Header push = push_of(1);
  push.crc ^= 1;
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(cache_->state(1), tier::State::empty);
}

TEST_P(TierTest, APushOfAnotherContentThanThisNodeReadIsNotTaken) {
  start(GetParam());
  EXPECT_TRUE(cache_->sums().agrees(1, sample_sum(bytes_of(2))));
  Session session = served();
  for (const uint64_t sample : {1, 2}) say_push(session, sample);
  EXPECT_TRUE(eventually([&] { return cache_->state(2) == tier::State::ready; }));
  EXPECT_EQ(cache_->state(1), tier::State::empty);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

TEST_P(TierTest, WhatIsThereAlreadyOrNeverWillBeIsAnsweredAtOnce) {
  start(GetParam());
  Session session = served();
  put(*cache_, 1);
  say_push(session, 1);
  EXPECT_TRUE(eventually([&] { return exchange_->stats().redundant == 1; }));
  cache_->reject(1);
  for (const auto& [sample, status] :
       {std::pair{uint64_t{1}, Status::never}, std::pair{uint64_t{2}, Status::not_yet}}) {
    Header fetch = message(Kind::fetch, sample);
    wire_->say(session.seal(fetch));
    const Header reply = wire_->hear(Kind::reply);
    EXPECT_EQ(reply.sample, sample);
    EXPECT_EQ(reply.status, status);
  }
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TierTest,
                         testing::Values(tier::TierKind::ram, tier::TierKind::file));

TEST_F(HostileTest, WithoutMemoryASampleFailsAndTheProcessGoesOn) {
  start();
  Session session = answering();
  EXPECT_TRUE(reachable());
  wire_->out_of_memory = true;
  std::vector<std::byte> into;
  const auto failing = begin_fetch(into);
  exchange_->finish(*failing, {});
  EXPECT_EQ(failing->requests[0].outcome, Outcome::failed);
  EXPECT_TRUE(eventually([&] { return !warnings().empty(); }));
  wire_->out_of_memory = false;
  expect_fetched(session);
  EXPECT_EQ(warnings().size(), 1u);
  EXPECT_THAT(warnings(), Contains(HasSubstr("failed to send or receive a sample")));
}

class AnswerTest : public HostileTest {
 protected:
  // Asks for sample 0, which the test's node owns, and lets the test answer.
  Outcome ask(const std::function<void(Session&, const Header&)>& reply) {
    asked_.emplace(asked_session());
    reply(asked_->session, asked_->fetch);
    return outcome_of(*asked_->group);
  }
  std::optional<Asked> asked_;
};

TEST_F(AnswerTest, TheRightBytesArrive) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) { answer(session, fetch); }),
            Outcome::here);
  EXPECT_EQ(asked_->into, bytes_of(0));
}

TEST_F(AnswerTest, WrongBytesAreNotTaken) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header reply = reply_to(fetch, bytes_of(0));
              reply.crc ^= 1;
              wire_->say(session.seal(reply), bytes_of(0));
            }),
            Outcome::failed);
  EXPECT_TRUE(alone());
}

TEST_F(AnswerTest, AnAnswerOfAnotherSampleIsNotTaken) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header reply = reply_to(fetch, bytes_of(0));
              reply.sample = 2;
              wire_->say(session.seal(reply), bytes_of(0));
            }),
            Outcome::failed);
}

TEST_F(AnswerTest, AnAnswerTooLongIsNotTaken) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              std::vector<std::byte> bytes = bytes_of(0);
              bytes.push_back(std::byte{1});
              Header reply = reply_to(fetch, bytes);
              wire_->say(session.seal(reply), bytes);
            }),
            Outcome::failed);
}

TEST_F(AnswerTest, AnAnswerToNoRequestIsPassedOver) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header stray = reply_to(fetch, bytes_of(0));
              stray.request += 1;
              wire_->say(session.seal(stray), bytes_of(0));
              answer(session, fetch);
            }),
            Outcome::here);
  EXPECT_EQ(asked_->into, bytes_of(0));
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

TEST_F(AnswerTest, ASecondAnswerWhileTheFirstArrivesIsNotTaken) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              wire_->stalled = true;
              for (int i = 0; i < 2; ++i) answer(session, fetch);
              wire_->wait_for_held(1);
              // Until the transfer is given up: its connection must end first.
              for (int i = 0; i < 2; ++i) wire_->pass(kSilence);
            }),
            Outcome::failed);
  EXPECT_TRUE(alone());
}

TEST_F(AnswerTest, NeverMeansTheSource) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header reply = reply_to(fetch, {});
              reply.status = Status::never;
              wire_->say(session.seal(reply));
            }),
            Outcome::never);
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
  EXPECT_EQ(exchange_->stats().asked_in_vain, 1u);
  // Its owner may have had no memory: at the next epoch it is asked again.
  exchange_->try_again();
  EXPECT_EQ(exchange_->where(0, 1), Where::there);
}

TEST_F(AnswerTest, SilenceEnds) {
  EXPECT_EQ(ask([&](Session&, const Header&) { wire_->pass(kSilence); }), Outcome::failed);
  EXPECT_TRUE(dropped());
}

TEST_F(AnswerTest, WhatTheOwnerLacksIsPushedAfterAll) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header reply = reply_to(fetch, {});
              reply.status = Status::not_yet;
              wire_->say(session.seal(reply));
            }),
            Outcome::not_yet);
  EXPECT_TRUE(exchange_->push_wanted(0));
  EXPECT_FALSE(exchange_->push_wanted(2));
  EXPECT_TRUE(push(0));
  EXPECT_EQ(wire_->hear(Kind::push).sample, 0u);
  EXPECT_FALSE(exchange_->push_wanted(0));
}

// A process that was stopped keeps its connections.
class StallTest : public HostileTest {};

TEST_F(StallTest, ARankThatTakesNoPushIsDropped) {
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  wire_->wait_for_held(1);
  wire_->pass(kSilence);
  EXPECT_EQ(exchange_->nodes_alive(), 1u);
  EXPECT_FALSE(push(2));
}

TEST_F(StallTest, ARankThatNeverEndsAPushIsDropped) {
  start();
  answering(0);
  Session session = served();
  wire_->stalled = true;
  say_push(session, 1);
  wire_->wait_for_held(1);
  wire_->pass(kSilence);
  EXPECT_EQ(exchange_->nodes_alive(), 1u);
}

TEST_F(StallTest, TransfersUnderWayEndBeforeWhatTheyTouch) {
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  wire_->hear(Kind::push);
  wire_->ending = true;
  wire_ = nullptr;
  exchange_.reset();
}

class LandingTest : public StallTest,
                    public testing::WithParamInterface<std::tuple<tier::TierKind, bool>> {};

TEST_P(LandingTest, WhatArrivesWhileTheTransportEndsIsTakenIfItIsGood) {
  const auto [kind, good] = GetParam();
  start(kind);
  Session session = served();
  wire_->stalled = wire_->lands = true;
  Header push = push_of(1);
  push.crc ^= good ? 0 : 1;
  wire_->say(session.seal(push), bytes_of(1));
  wire_->wait_for_held(1);
  wire_->ending = true;
  wire_ = nullptr;
  exchange_.reset();
  EXPECT_EQ(cache_->state(1), good ? tier::State::ready : tier::State::empty);
}

INSTANTIATE_TEST_SUITE_P(
    KindsAndBytes, LandingTest,
    testing::Combine(testing::Values(tier::TierKind::ram, tier::TierKind::file), testing::Bool()));

TEST_F(StallTest, WhatIsSaidWhileTheTransportEndsIsNotHeard) {
  start();
  put(*cache_, 1);
  Session session = served();
  const auto say_too_late = [&](const HeaderBytes& header, std::vector<std::byte> payload) {
    wire_->too_late.push_back({{header.begin(), header.end()}, std::move(payload)});
  };
  say_too_late(encode(greeting()), {});
  Header fetch = message(Kind::fetch, 1), push = push_of(3);
  say_too_late(session.seal(fetch), {});
  say_too_late(session.seal(push), bytes_of(3));
  wire_->ending = true;
  wire_ = nullptr;
  exchange_.reset();
  EXPECT_EQ(cache_->state(3), tier::State::empty);
}

// All ranks of a node hang: a thread that needs a sample does not wait for each of them in turn, but
// ends while the second one has still time to be heard.
TEST_F(StallTest, ANodeThatHangsCostsOneTimeout) {
  start(tier::TierKind::ram, 3);
  answering();
  ASSERT_TRUE(reachable());
  EXPECT_EQ(fetch_in_vain(), Outcome::failed);
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  wire_->settle();
  wire_->pass(kSilence);
  EXPECT_EQ(outcome_of(*group), Outcome::failed);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 1u);
}

// However long they take together.
TEST_F(StallTest, AnswersThatComeOneAfterTheOtherAreNotLate) {
  start();
  Session session = answering();
  ASSERT_TRUE(reachable());
  std::vector<std::shared_ptr<FetchGroup>> groups;
  std::vector<std::vector<std::byte>> into(5);
  std::vector<Header> asked;
  for (const uint64_t sample : {0, 2, 4, 6, 8}) {
    into[sample / 2].resize(sizes_[sample]);
    groups.push_back(exchange_->begin({{sample, into[sample / 2], nullptr, Outcome::waiting}}));
    asked.push_back(hear_fetch(session));
  }
  // One is left out.
  for (const size_t i : {0u, 2u}) {
    wire_->pass(kTimeout / 2);
    answer(session, asked[i]);
    ASSERT_EQ(outcome_of(*groups[i]), Outcome::here);
    wire_->settle();
    ASSERT_EQ(exchange_->stats().dropped_ranks, 0u) << i;
  }
  // What was overtaken is late one timeout after the last answer before it.
  wire_->pass(kTimeout / 2 + 1s);
  EXPECT_TRUE(dropped());
  EXPECT_EQ(outcome_of(*groups[1]), Outcome::failed);
  EXPECT_EQ(outcome_of(*groups[4]), Outcome::failed);
}

// A second for each 4 MiB.
TEST_F(StallTest, ALargePayloadHasMoreTime) {
  auto [session, into, group, asked] = asked_session();
  wire_->pass(kTimeout + 50ms);  // of 300 KB
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
  wire_->pass(50ms);
  EXPECT_TRUE(dropped());
  EXPECT_EQ(outcome_of(*group), Outcome::failed);
}

// A request behind a large one: both have the time of the large one.
TEST_F(StallTest, ARequestBehindALargeOneIsNotLate) {
  start();
  Session session = answering();
  ASSERT_TRUE(reachable());
  sizes_[0] = uint64_t{1} << 30;  // 256 s
  // Not touched, as nothing arrives.
  const std::unique_ptr<std::byte[]> large(new std::byte[sizes_[0]]);
  std::vector<std::byte> small(sizes_[2]);
  const auto first = exchange_->begin({{0, {large.get(), sizes_[0]}, nullptr, Outcome::waiting}});
  const auto second = exchange_->begin({{2, small, nullptr, Outcome::waiting}});
  for (int i = 0; i < 2; ++i) hear_fetch(session);
  wire_->pass(kTimeout + 255s);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
  wire_->pass(2s);
  EXPECT_TRUE(dropped());
  EXPECT_EQ(outcome_of(*first), Outcome::failed);
  EXPECT_EQ(outcome_of(*second), Outcome::failed);
}

// Each has two seconds for its 8 MiB, and they share the link.
TEST_F(StallTest, PayloadsThatMoveAtOnceHaveTheTimeOfAll) {
  for (const bool pushed : {false, true}) {
    start();
    Session session = answering(pushed ? 0 : plan::kNever);
    ASSERT_TRUE(pushed ? pushes_wanted() : reachable());
    sizes_[0] = sizes_[2] = uint64_t{8} << 20;
    wire_->stalled = true;
    std::vector<std::byte> into[2];
    std::vector<std::shared_ptr<FetchGroup>> groups;
    for (const uint64_t sample : {0, 2}) {
      if (pushed) {
        EXPECT_TRUE(push(sample));
        continue;
      }
      std::vector<std::byte>& to = into[sample / 2];
      to.resize(sizes_[sample]);
      groups.push_back(exchange_->begin({{sample, to, nullptr, Outcome::waiting}}));
      answer(session, hear_fetch(session));
    }
    wire_->wait_for_held(2);
    // The request of a small one does not come through before them.
    std::vector<std::byte> small(sizes_[4]);
    groups.push_back(exchange_->begin({{4, small, nullptr, Outcome::waiting}}));
    hear_fetch(session);
    wire_->pass(kTimeout + 3s);
    EXPECT_EQ(exchange_->stats().dropped_ranks, 0u) << pushed;
    wire_->pass(2s);
    EXPECT_TRUE(dropped()) << pushed;
    wire_->release();
    for (const auto& group : groups) EXPECT_EQ(outcome_of(*group), Outcome::failed);
    TearDown();
    sizes_.clear();
    SetUp();
  }
}

// A rank that has nothing for this one is there all the same.
TEST_F(StallTest, AnAnswerWithoutBytesIsOneToo) {
  auto [session, into, group, asked] = asked_session();
  std::vector<std::byte> small(sizes_[2]);
  const auto later = exchange_->begin({{2, small, nullptr, Outcome::waiting}});
  hear_fetch(session);
  wire_->pass(kTimeout / 2);
  Header reply = reply_to(asked, {});
  reply.status = Status::not_yet;
  wire_->say(session.seal(reply));
  EXPECT_EQ(outcome_of(*group), Outcome::not_yet);
  wire_->settle();
  wire_->pass(kTimeout / 2 + 1s);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
  wire_->pass(kTimeout / 2);
  EXPECT_TRUE(dropped());
  EXPECT_EQ(outcome_of(*later), Outcome::failed);
}

TEST_F(StallTest, AStopEndsWhatIsAsked) {
  auto [session, into, group, asked] = asked_session();
  std::stop_source stop;
  stop.request_stop();
  const auto begin = std::chrono::steady_clock::now();
  exchange_->finish(*group, stop.get_token());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
}

TEST_F(StallTest, AStopEndsWhatWaitsForAConnection) {
  start();
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  std::stop_source stop;
  stop.request_stop();
  const auto begin = std::chrono::steady_clock::now();
  exchange_->finish(*group, stop.get_token());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
}

TEST_F(StallTest, PushesToANodeThatIsNotThereYetCostNoTime) {
  start();
  sizes_[0] = sizes_[2] = uint64_t{33} << 20;
  const auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(0));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(exchange_->push(0, *bytes, bytes, {}));
  EXPECT_FALSE(exchange_->push(2, *bytes, bytes, {}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
}

// ------------------------------------------------------------------------------- lost and back
// again

class ReturnTest : public StallTest {
 protected:
  // The rank of the test is lost, for it answers a fetch with nothing.
  void lose() {
    ASSERT_TRUE(reachable());
    ASSERT_EQ(fetch_in_vain(), Outcome::failed);
    ASSERT_TRUE(alone());
    ASSERT_EQ(exchange_->where(0, 1), Where::source);
  }
};

TEST_F(ReturnTest, ARankThatWasSilentIsAskedAgain) {
  start();
  answering();
  for (uint64_t times = 1; times <= 2; ++times) {
    lose();
    wire_->pass(1s);  // until the next hello
    Session session = answering();
    ASSERT_TRUE(reachable());
    EXPECT_EQ(exchange_->nodes_alive(), 2u);
    EXPECT_EQ(exchange_->stats().returned_ranks, times);
    if (times == 2) expect_fetched(session);
  }
  EXPECT_THAT(warnings(),
              Contains(HasSubstr("until it is reached again; no other node is reached")));
}

// Only one side has lost the other: what that one asks goes on, else both would end each other's
// sessions for ever.
TEST_F(ReturnTest, ARankThatIsLostIsAnsweredStill) {
  start();
  put(*cache_, 1);
  answering();
  Session asks = served();
  lose();
  Header wanted = message(Kind::fetch, 1);
  wire_->say(asks.seal(wanted));
  const Header reply = wire_->hear(Kind::reply);
  EXPECT_TRUE(asks.open(reply));
  EXPECT_EQ(reply.status, Status::here);
  EXPECT_EQ(exchange_->stats().refused, 0u);
}

// A transfer that did not end with its connection is of no importance for the next one.
TEST_F(ReturnTest, WhatStoodStillBeforeDoesNotCountAfterwards) {
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  wire_->wait_for_held(1);
  wire_->pass(kSilence);
  ASSERT_TRUE(alone());
  wire_->stalled = false;
  wire_->pass(1s);
  answering(0);
  ASSERT_TRUE(eventually([&] { return exchange_->nodes_alive() == 2; }));
  wire_->pass(kSilence);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(ReturnTest, AFetchThatStoodStillBeforeDoesNotCountAfterwards) {
  auto [session, into, group, asked] = asked_session();
  wire_->stalled = true;
  answer(session, asked);
  wire_->wait_for_held(1);
  wire_->pass(kSilence);
  ASSERT_TRUE(alone());
  wire_->stalled = false;
  // It knocks, so it is asked again at once, while the transfer has not been given up.
  asking();
  answering();
  wire_->pass(kSilence);
  exchange_->finish(*group, {});
  EXPECT_EQ(exchange_->stats().dropped_ranks, 1u);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(ReturnTest, APayloadThatWasNeverSentIsNotWaitedFor) {
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->out_of_memory = true;
  EXPECT_TRUE(push(0));
  ASSERT_TRUE(eventually([&] { return exchange_->stats().pushes_given_up == 1; }));
  wire_->out_of_memory = false;
  wire_->pass(kSilence);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(ReturnTest, ARankThatKnocksIsAskedAgainAtOnceAndServed) {
  start();
  answering();
  put(*cache_, 1);
  lose();
  Session asks = served();
  const Header hello = wire_->hear(Kind::hello);
  Header wanted = message(Kind::fetch, 1);
  wire_->say(asks.seal(wanted));
  EXPECT_EQ(wire_->hear(Kind::reply).status, Status::here);
  Session session = answering_to(hello);
  ASSERT_TRUE(reachable());
  expect_fetched(session);
}

TEST_F(ReturnTest, WhatWasSaidBeforeItWasLostIsNotTakenAfterwards) {
  start();
  Session old = answering();
  lose();
  Header welcome = message(Kind::welcome, 0);
  wire_->say(old.seal(welcome));
  EXPECT_TRUE(refused(1));
  EXPECT_EQ(exchange_->nodes_alive(), 1u);
}

TEST_F(ReturnTest, ARankThatBrokeTheRulesOrLeftIsNotTriedAgain) {
  for (const Kind kind : {Kind::fetch, Kind::leave}) {
    start();
    answering();
    ASSERT_TRUE(reachable());
    Session session = asking();
    wire_->hear(Kind::welcome);
    Header last = message(kind, kSamples);
    wire_->say(session.seal(last));
    ASSERT_TRUE(alone());
    // What it says is not even looked at any more: this would be refused.
    wire_->say(session.seal(last));
    wire_->say(encode(greeting()));
    wire_->say(std::vector<std::byte>{});
    EXPECT_TRUE(refused(1));
    EXPECT_EQ(exchange_->nodes_alive(), 1u);
    TearDown();
    sizes_.clear();
    SetUp();
  }
}

TEST_F(ReturnTest, AnotherRankOfTheNodeServesUntilThePreferredOneIsBack) {
  start(tier::TierKind::ram, 1);
  answering();
  ASSERT_TRUE(reachable());
  ASSERT_EQ(fetch_in_vain(), Outcome::failed);
  Header hello;
  do hello = wire_->hear(Kind::hello);
  while (hello.to != 2);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
  wire_->pass(1s);
  do hello = wire_->hear(Kind::hello);
  while (hello.to != 0);
  Session session = answering_to(hello);
  ASSERT_TRUE(reachable());
  expect_fetched(session);
}

// Hellos are not authenticated: any process can send one in the name of any rank.
TEST_F(ReturnTest, ForgedHellosKeepNobodyOut) {
  start();
  put(*cache_, 1);
  const Header hello = greeting();
  wire_->say(encode(hello));
  const Header challenge = wire_->hear(Kind::challenge);
  Session session(key_of(kSecret), 0, 1, hello.nonce, challenge.nonce);
  for (int i = 0; i < 1000; ++i) wire_->say(encode(greeting()));
  Header proof = proof_for(hello);
  wire_->say(session.seal(proof));
  wire_->hear(Kind::welcome);
  EXPECT_EQ(exchange_->stats().refused, 0u);
}

TEST_F(ReturnTest, AProofIsTakenOnce) {
  start();
  put(*cache_, 1);
  const Header hello = greeting();
  wire_->say(encode(hello));
  const Header challenge = wire_->hear(Kind::challenge);
  Session session(key_of(kSecret), 0, 1, hello.nonce, challenge.nonce);
  Header proof = proof_for(hello), fetch = message(Kind::fetch, 1);
  const HeaderBytes proved = session.seal(proof), fetched = session.seal(fetch);
  wire_->say(proved);
  wire_->say(fetched);
  wire_->hear(Kind::reply);
  for (const HeaderBytes& again : {encode(hello), proved, fetched}) wire_->say(again);
  EXPECT_TRUE(refused(2));
  EXPECT_EQ(exchange_->stats().served, 1u);
}

TEST_F(HostileTest, ARankWithAnotherPlanIsWarnedOfOnce) {
  start();
  for (int i = 0; i < 3; ++i) wire_->say(encode(message(Kind::hello, 78)));
  EXPECT_TRUE(refused(3));
  EXPECT_EQ(warnings().size(), 1u);
}

}  // namespace
}  // namespace nostall::peer
