// What is refused, lost or passed over between ranks, beside what hostile peers do: addresses of no use,
// payloads that do not arrive, samples without a place, ranks that go while something is asked.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <new>

#include "../sanitized.h"
#include "hostile.h"

#if !NOSTALL_SANITIZED_HEAP
namespace {
thread_local bool exhausted = false;  // this thread gets no memory
}  // namespace

void* operator new(size_t size) {
  void* const memory = exhausted ? nullptr : std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return exhausted ? nullptr : std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace nostall::peer {
namespace {

using testing::Contains;
using testing::HasSubstr;

class RefusalTest : public HostileTest {
 protected:
  // Sample 1 belongs to this node, 3 has no place there, 5 belongs to nobody.
  static constexpr uint64_t kMine = 1, kUnplaced = 3, kNobodys = 5;

  Status answer_to(Session& session, uint64_t sample) {
    Header wanted = message(Kind::fetch, sample);
    wire_->say(session.seal(wanted));
    const Header reply = wire_->hear(Kind::reply);
    EXPECT_TRUE(session.open(reply));
    return reply.status;
  }
  Header hello_to(uint32_t rank) {
    Header hello;
    do hello = wire_->hear(Kind::hello);
    while (hello.to != rank);
    return hello;
  }
  Outcome outcome_of_one(const Fetch& request) { return outcome_of(*exchange_->begin({request})); }
};

TEST_F(RefusalTest, ARankWhoseAddressIsOfNoUseIsLostWithTheReason) {
  start();
  wire_->hear(Kind::hello);
  wire_->unreachable = true;
  wire_->say(encode(greeting()));
  EXPECT_TRUE(dropped());
  expect_warning("lost rank 0: no way to rank 0; what node 0 keeps");
  wire_->unreachable = false;
  wire_->pass(1s);
  answering();
  EXPECT_TRUE(reachable());
}

TEST_F(RefusalTest, ARankThatCannotBeReachedAfterItsProofGetsNoWelcome) {
  start();
  const Header hello = greeting();
  wire_->say(encode(hello));
  const Header challenge = wire_->hear(Kind::challenge);
  Session session(key_of(kSecret), 0, 1, hello.nonce, challenge.nonce);
  wire_->unreachable = true;
  Header proof = proof_for(hello);
  wire_->say(session.seal(proof));
  EXPECT_TRUE(dropped());
  // Nor an answer, and nothing else happens.
  Header wanted = message(Kind::fetch, kMine);
  wire_->say(session.seal(wanted));
  wire_->settle();
  EXPECT_EQ(exchange_->stats().served, 0u);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 1u);
}

TEST_F(RefusalTest, AChallengeThatNobodyAskedForIsPassedOver) {
  start(tier::TierKind::ram, 1);
  Session session = answering();
  ASSERT_TRUE(reachable());
  // A second one of a rank that is connected, and one of a rank that has been sent no hello.
  for (const uint32_t from : {0u, 2u}) {
    Header challenge = message(Kind::challenge, 0);
    challenge.from = from;
    challenge.nonce = random_nonce();
    wire_->say(encode(challenge));
  }
  wire_->settle();
  EXPECT_EQ(exchange_->stats().refused, 0u);
  expect_fetched(session);
}

TEST_F(RefusalTest, AChallengeWithoutTheSecretIsRefused) {
  start();
  wire_->hear(Kind::hello);
  Header challenge = message(Kind::challenge, 0);
  challenge.nonce = random_nonce();
  wire_->say(encode(challenge));
  EXPECT_TRUE(refused(1));
  EXPECT_FALSE(exchange_->stats().dropped_ranks);
}

TEST_F(RefusalTest, WhatIsBeingFilledIsNotThereYetAndIsNotTakenTwice) {
  start();
  ASSERT_TRUE(cache_->claim(kMine));
  Session session = served();
  EXPECT_EQ(answer_to(session, kMine), Status::not_yet);
  say_push(session, kMine);
  EXPECT_TRUE(eventually([&] { return exchange_->stats().redundant == 1; }));
  EXPECT_EQ(cache_->state(kMine), tier::State::filling);
}

TEST_F(RefusalTest, APushOfASampleThatTheJobDoesNotHaveIsDropped) {
  start();
  Session session = served();
  Header pushed = message(Kind::push, kSamples, 4);
  wire_->say(session.seal(pushed), std::vector<std::byte>(4));
  EXPECT_TRUE(dropped());
  expect_warning("it pushed 4 bytes as sample 24");
}

TEST_F(RefusalTest, ASampleWithoutAPlaceIsNeverThereAndNotTaken) {
  unplaced_ = {kUnplaced};
  start();
  Session session = served();
  EXPECT_EQ(answer_to(session, kUnplaced), Status::never);
  say_push(session, kUnplaced);
  EXPECT_TRUE(eventually([&] { return exchange_->stats().redundant == 1; }));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(RefusalTest, APushIsNotTakenWhereTheTierGetsNoMemory) {
  files_.errors["allocate"] = ENOSPC;
  start();
  Session session = served();
  say_push(session, kMine);
  EXPECT_TRUE(eventually([&] { return cache_->state(kMine) == tier::State::failed; }));
  EXPECT_EQ(answer_to(session, kMine), Status::never);
  EXPECT_EQ(exchange_->stats().received, 0u);
  EXPECT_THAT(warnings(), Contains(HasSubstr("the RAM tier takes no more memory")));
}

TEST_F(RefusalTest, ASampleBeyondMemoryIsNeverAnswered) {
  start(tier::TierKind::file);
  put(*cache_, kMine);
  Session session = served();
  sizes_[kMine] = uint64_t{1} << 63;  // refused before sanitizers see it
  EXPECT_EQ(answer_to(session, kMine), Status::never);
  EXPECT_THAT(warnings(), Contains(HasSubstr("failed to send or receive a sample")));
}

TEST_F(RefusalTest, ADamagedRecordOfAnEarlierJobIsTakenAnew) {
  const auto kept = [this] {
    return cache_below(root_ / "kept", "kept", tier::TierKind::file, sizes_, nullptr, {}, true);
  };
  put(*kept(), kMine);
  for (const auto& e : std::filesystem::recursive_directory_iterator(root_ / "kept")) {
    if (e.path().extension() != ".tier") continue;
    std::fstream file(e.path());
    file.seekp(-1, std::ios::end).put('x');
  }
  arrange_ = [&](ExchangeConfig&, plan::Ownership&) { cache_ = kept(); };
  start();
  ASSERT_EQ(cache_->state(kMine), tier::State::ready);
  Session session = served();
  EXPECT_EQ(answer_to(session, kMine), Status::not_yet);
  say_push(session, kMine);
  EXPECT_TRUE(eventually([&] { return cache_->state(kMine) == tier::State::ready; }));
  EXPECT_EQ(answer_to(session, kMine), Status::here);
}

#if !NOSTALL_SANITIZED_HEAP
class WithoutMemory : public RefusalTest {
 protected:
  void SetUp() override {
    RefusalTest::SetUp();
    bool refused = false;
    exhausted = true;
    try {
      ::operator delete(::operator new(1));
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    exhausted = false;
    ASSERT_TRUE(refused);
  }
};

TEST_F(WithoutMemory, APushTakesNoRoom) {
  arrange_ = [](ExchangeConfig& config, plan::Ownership&) { config.push_bytes = 1; };
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  const auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(0));
  exhausted = true;
  const bool pushed = exchange_->push(0, *bytes, bytes, {});
  exhausted = false;
  EXPECT_FALSE(pushed);
  EXPECT_EQ(exchange_->stats().pushes_given_up, 1u);
  EXPECT_TRUE(push(0));
}

TEST_F(WithoutMemory, AStopIsNoEnd) {
  auto [session, into, group, asked] = asked_session();
  std::stop_source stop;
  stop.request_stop();
  answer(session, asked);
  exhausted = true;
  exchange_->finish(*group, stop.get_token());
  exhausted = false;
  EXPECT_EQ(group->requests[0].outcome, Outcome::here);
}
#endif

class TornTest : public RefusalTest, public testing::WithParamInterface<tier::TierKind> {};

TEST_P(TornTest, APushThatDoesNotArriveLeavesTheSampleEmpty) {
  start(GetParam());
  Session session = served();
  wire_->torn = true;
  say_push(session, kMine);
  wire_->settle();
  EXPECT_EQ(cache_->state(kMine), tier::State::empty);
  wire_->torn = false;
  say_push(session, kMine);
  EXPECT_TRUE(eventually([&] { return cache_->state(kMine) == tier::State::ready; }));
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TornTest,
                         testing::Values(tier::TierKind::ram, tier::TierKind::file));

TEST_F(RefusalTest, AnAnswerThatDoesNotArriveFailsItsFetchAlone) {
  auto [session, into, group, asked] = asked_session();
  wire_->torn = true;
  answer(session, asked);
  EXPECT_EQ(outcome_of(*group), Outcome::failed);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
  wire_->torn = false;
  expect_fetched(session);
}

// Progress must not wait for ever for a sample that nobody can read.
TEST_F(RefusalTest, ProgressPassesOverWhatDoesNotCome) {
  start();
  put(*cache_, 3);
  put(*cache_, 7);
  asking();
  EXPECT_EQ(wire_->hear(Kind::welcome).progress, 1u);
  wire_->pass(2s);
  EXPECT_EQ(wire_->hear(Kind::progress).progress, 9u);
  for (uint64_t s = 9; s < kSamples; s += 2) put(*cache_, s);
  wire_->pass(1s);
  EXPECT_EQ(wire_->hear(Kind::progress).progress, plan::kNever);
}

TEST_F(RefusalTest, AnAnswerOfAnotherRankThanTheOneThatWasAskedIsNotTaken) {
  auto [session, into, group, asked] = asked_session(1);
  wire_->stalled = true;
  answer(session, asked);
  wire_->wait_for_held(1);
  wire_->lose(0);
  Session second = answering_to(hello_to(2));
  ASSERT_TRUE(reachable());
  Header other = reply_to(asked, bytes_of(0));
  other.from = 2;
  wire_->say(second.seal(other), bytes_of(0));
  EXPECT_TRUE(alone());
  expect_warning("lost rank 2: it answered 300000 bytes of sample 0");
  wire_->pass(kSilence);
  wire_->pass(kSilence);
  EXPECT_EQ(outcome_of(*group), Outcome::failed);
}

TEST_F(RefusalTest, WhatIsNobodysOrThisNodesIsNotAskedForNorPushed) {
  arrange_ = [](ExchangeConfig&, plan::Ownership& o) {
    o.owner[kNobodys] = o.first_reader[kNobodys] = plan::kNoOwner;
  };
  start();
  answering();
  ASSERT_TRUE(reachable());
  for (const uint64_t sample : {kMine, kNobodys}) {
    std::vector<std::byte> into(sizes_[sample]);
    EXPECT_EQ(outcome_of_one({sample, into, nullptr, Outcome::waiting}), Outcome::failed);
    EXPECT_FALSE(exchange_->push_wanted(sample));
    EXPECT_FALSE(push(sample));
  }
  EXPECT_EQ(exchange_->where(kNobodys, 1), Where::source);
  std::vector<std::byte> wrong(sizes_[0] + 1);
  EXPECT_EQ(outcome_of_one({0, wrong, nullptr, Outcome::waiting}), Outcome::failed);
  EXPECT_FALSE(exchange_->push_wanted(0)) << "its owner has all that it owns";
}

TEST_F(RefusalTest, WhatNoMessageCarriesComesFromTheSource) {
  sizes_[0] = sizes_[kMine] = kMaxPayload + 1;
  sizes_[2] = kMaxPayload;
  unplaced_ = {0, 2};
  start();
  // Neither until its owner is heard, nor until another node has read it first, ...
  EXPECT_EQ(exchange_->where(0, 0), Where::source);
  EXPECT_EQ(exchange_->where(kMine, 0), Where::source);
  for (const uint64_t sample : {2, 3}) EXPECT_EQ(exchange_->where(sample, 0), Where::awaited);
  // ... nor once its owner can be asked.
  answering(0);
  EXPECT_TRUE(eventually([&] { return exchange_->push_wanted(2); }));
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
  EXPECT_FALSE(exchange_->push_wanted(0));
  EXPECT_FALSE(exchange_->push(0, {}, nullptr, {}));
  // Nobody waits for it before what comes later.
  asking();
  EXPECT_EQ(wire_->hear(Kind::welcome).progress, 3u);
}

// A kept record that is damaged, or what a store dropped: it is pushed once, for its first access.
TEST_F(RefusalTest, WhatAnOwnerHadIsNotAwaitedAgain) {
  start();
  for (const uint64_t sample : {kMine, kUnplaced}) {
    EXPECT_EQ(exchange_->where(sample, 1), Where::awaited);
  }
  put(*cache_, kMine);
  wire_->pass(1s);
  EXPECT_EQ(exchange_->where(kMine, 1), Where::source);
  EXPECT_EQ(exchange_->where(kUnplaced, 1), Where::awaited);
}

TEST_F(RefusalTest, ANodeWithoutRanksIsNotAlive) {
  arrange_ = [](ExchangeConfig& config, plan::Ownership& o) {
    config.node_of_rank = {0, 2, 2};
    config.addresses.push_back("wire");
    for (uint64_t s = 1; s < kSamples; s += 2) o.owner[s] = 1;
    o.first_reader[2] = 1;
  };
  start();
  wire_->hear(Kind::hello);
  wire_->settle();
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
  EXPECT_EQ(exchange_->where(1, 1), Where::source);
  // Its rank is not there to read it first.
  wire_->pass(3s);
  EXPECT_EQ(exchange_->where(2, 1), Where::source);
}

// Until it has sent its progress, a node may have samples of an earlier job.
TEST_F(RefusalTest, ANodeThatIsNotHeardIsTakenToHaveNothingAfterAWhile) {
  start();
  EXPECT_EQ(exchange_->where(0, 0), Where::awaited);
  wire_->pass(3s);
  EXPECT_EQ(exchange_->where(0, 0), Where::source);
}

TEST_F(RefusalTest, WithAGuessTheSourceIsTheOnlyOtherWay) {
  arrange_ = [this](ExchangeConfig& config, plan::Ownership&) {
    plan::Copies copies;
    for (uint64_t s = 0; s < kSamples; ++s) {
      copies.node.push_back(s == 2 ? plan::kNoOwner : 0);
      copies.tier.push_back(1);  // this node has no such tier
      copies.place.push_back(0);
    }
    config.guess =
        std::make_shared<Guess>(copies, std::vector<std::vector<plan::SampleId>>(1), cache_);
  };
  start();
  EXPECT_EQ(exchange_->where(0, 0), Where::source) << "it is not connected";
  answering(0);
  EXPECT_TRUE(reachable());
  EXPECT_EQ(exchange_->where(2, 0), Where::source);
}

TEST_F(RefusalTest, AStopEndsTheFetchesOfItsGroupAlone) {
  auto [session, into, kept, asked] = asked_session();
  std::vector<std::byte> two(sizes_[2]), four(sizes_[4]);
  const auto stopped =
      exchange_->begin({{2, two, nullptr, Outcome::waiting}, {4, four, nullptr, Outcome::waiting}});
  hear_fetch(session);
  const Header later = hear_fetch(session);
  // What arrives already is waited for.
  wire_->stalled = true;
  answer(session, later);
  wire_->wait_for_held(1);
  std::stop_source stop;
  stop.request_stop();
  auto finished =
      std::async(std::launch::async, [&] { exchange_->finish(*stopped, stop.get_token()); });
  wire_->settle();
  wire_->stalled = false;
  answer(session, asked);
  EXPECT_EQ(outcome_of(*kept), Outcome::here);
  wire_->release();
  finished.get();
  EXPECT_EQ(stopped->requests[0].outcome, Outcome::failed);
  EXPECT_EQ(stopped->requests[1].outcome, Outcome::failed);
}

TEST_F(RefusalTest, WhatWaitsForAConnectionFailsWithIt) {
  start();
  wire_->hear(Kind::hello);
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  wire_->settle();
  wire_->lose(0);
  EXPECT_EQ(outcome_of(*group), Outcome::failed);
  // Once is enough: nobody is warned of it again.
  wire_->lose(0);
  wire_->settle();
  EXPECT_EQ(warnings().size(), 1u);
  EXPECT_THAT(warnings(), Contains(HasSubstr("lost rank 0: its connection ended")));
}

// An attempt that has led to nothing is repeated on a new connection, with a new nonce.
TEST_F(RefusalTest, AnAttemptWithoutAnAnswerBeginsAnew) {
  start();
  const Header first = wire_->hear(Kind::hello);
  wire_->pass(2s);
  EXPECT_EQ(wire_->hear(Kind::hello).nonce, first.nonce);
  wire_->pass(6s);
  EXPECT_NE(wire_->hear(Kind::hello).nonce, first.nonce);
}

TEST_F(RefusalTest, ARankThatEndsIsMissedWithoutAWarning) {
  start();
  Session session = served();
  Header done = message(Kind::done, 0);
  wire_->say(session.seal(done));
  wire_->lose(0);
  EXPECT_TRUE(alone());
  EXPECT_TRUE(warnings().empty());
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

// The next rank of a node takes over, comes and goes; one that is not to be asked is left alone.
TEST_F(RefusalTest, RanksOfANodeTakeTurns) {
  start(tier::TierKind::ram, 1);
  answering();
  ASSERT_TRUE(reachable());
  wire_->lose(2);
  wire_->pass(30s);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
  EXPECT_THAT(warnings(),
              Contains(HasSubstr("lost rank 2: its connection ended; its node is asked")));
  wire_->lose(0);
  ASSERT_TRUE(alone());
  wire_->pass(1s);
  answering_to(hello_to(0));
  ASSERT_TRUE(reachable());
  EXPECT_EQ(exchange_->stats().returned_ranks, 1u);
}

TEST_F(RefusalTest, AtItsEndARankServesThoseThatStillAsk) {
  start();
  put(*cache_, kMine);
  Session session = served();
  Wire& wire = *wire_;
  auto ended = std::async(std::launch::async, [&] { exchange_.reset(); });
  ASSERT_TRUE(session.open(wire.hear(Kind::done)));
  EXPECT_EQ(answer_to(session, kMine), Status::here);
  Header done = message(Kind::done, 0);
  wire.say(session.seal(done));
  EXPECT_TRUE(session.open(wire.hear(Kind::leave)));
  wire_ = nullptr;
  wire.ending = true;
  ended.get();
}

TEST_F(RefusalTest, ATransferThatNeverEndsDoesNotKeepItsRankFromLeaving) {
  auto [session, into, group, asked] = asked_session();
  wire_->stalled = true;
  answer(session, asked);
  wire_->wait_for_held(1);
  wire_->ending = true;
  wire_ = nullptr;
  exchange_.reset();
  EXPECT_EQ(group->requests[0].outcome, Outcome::failed);
}

}  // namespace
}  // namespace nostall::peer
