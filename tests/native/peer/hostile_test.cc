// Peers that are not what they say, or do not keep to the rules: a transport that the test speaks
// through.
#include <gmock/gmock.h>

#include <condition_variable>
#include <deque>

#include "base/crc32c.h"
#include "nodes.h"
#include "peer/session.h"

namespace nostall::peer {
namespace {

using namespace std::chrono_literals;
using testing::Contains;
using testing::HasSubstr;

constexpr const char* kSecret = "the secret of this job";

// What rank 0 of the test sends to the exchange of rank 1, and what it hears.
class Wire final : public Transport {
 public:
  struct Message {
    std::vector<std::byte> header;
    std::vector<std::byte> payload;
  };

  // As the contract says, what is under way ends before the transport does.
  ~Wire() override {
    for (const auto& done : held_) done(false);
  }

  std::string address() override { return "wire"; }
  void connect(uint32_t, const std::string&) override {}
  void send(uint32_t, const HeaderBytes& header, std::span<const std::byte> payload,
            std::function<void(bool)> done) override {
    if (out_of_memory) throw std::bad_alloc();
    {
      const std::scoped_lock lock(mutex_);
      heard_.push_back({{header.begin(), header.end()}, {payload.begin(), payload.end()}});
    }
    if (done && stalled) {
      held_.push_back(std::move(done));
    } else if (done) {
      done(true);
    }
  }
  void drop(uint32_t) override {}
  bool progress(Receiver& receiver) override {
    if (out_of_memory) throw std::bad_alloc();
    Message message;
    {
      const std::scoped_lock lock(mutex_);
      if (to_come_.empty()) return false;
      message = std::move(to_come_.front());
      to_come_.pop_front();
    }
    const Delivery delivery = receiver.on_message(message.header, message.payload.size());
    const bool wanted = delivery.into.size() == message.payload.size();
    if (stalled && wanted && delivery.done) {
      held_.push_back(delivery.done);
      return true;
    }
    if (wanted) std::copy(message.payload.begin(), message.payload.end(), delivery.into.begin());
    if (delivery.done) delivery.done(wanted);
    return true;
  }
  void wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    woken_.wait_for(lock, timeout, [&] { return awake_ || !to_come_.empty(); });
    awake_ = false;
  }
  void wake() noexcept override {
    {
      const std::scoped_lock lock(mutex_);
      awake_ = true;
    }
    woken_.notify_all();
  }

  void say(std::vector<std::byte> header, std::vector<std::byte> payload = {}) {
    {
      const std::scoped_lock lock(mutex_);
      to_come_.push_back({std::move(header), std::move(payload)});
    }
    woken_.notify_all();
  }
  void say(const HeaderBytes& header, std::vector<std::byte> payload = {}) {
    say(std::vector<std::byte>(header.begin(), header.end()), std::move(payload));
  }
  // The next message of a kind; those before it are forgotten.
  Header hear(Kind kind) {
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (std::chrono::steady_clock::now() < end) {
      {
        const std::scoped_lock lock(mutex_);
        while (!heard_.empty()) {
          const Header header = decode(heard_.front().header).take();
          payload_ = std::move(heard_.front().payload);
          heard_.pop_front();
          if (header.kind == kind) return header;
        }
      }
      std::this_thread::sleep_for(1ms);
    }
    ADD_FAILURE() << "no message of kind " << int(kind);
    return {};
  }
  const std::vector<std::byte>& payload() const { return payload_; }

  std::atomic<bool> out_of_memory{false};
  std::atomic<bool> stalled{false};  // payloads are on their way for ever, in both directions

 private:
  std::vector<std::function<void(bool)>> held_;  // of those payloads; of the exchange's thread
  std::mutex mutex_;
  std::condition_variable woken_;
  bool awake_ = false;
  std::deque<Message> to_come_, heard_;
  std::vector<std::byte> payload_;
};

class HostileTest : public Nodes {
 protected:
  // The exchange is rank 1, on node 1; the test is rank 0.
  void start(std::chrono::milliseconds timeout = 2s, tier::TierKind kind = tier::TierKind::ram,
             uint32_t more_ranks_of_node_0 = 0) {
    ExchangeConfig config;
    config.rank = 1;
    config.node_of_rank = {0, 1};
    config.addresses = {"wire", "wire"};
    for (uint32_t r = 0; r < more_ranks_of_node_0; ++r) {
      config.node_of_rank.push_back(0);
      config.addresses.push_back("wire");
    }
    config.secret = kSecret;
    config.plan = 77;
    config.epoch_length = kSamples;
    config.timeout = timeout;
    cache_ = cache_of(1, kind);
    auto transport = std::make_unique<Wire>();
    wire_ = transport.get();
    exchange_ =
        std::make_unique<Exchange>(std::move(transport), config, ownership(2), sizes_, cache_);
  }
  void TearDown() override {
    exchange_.reset();
    cache_.reset();
    Nodes::TearDown();
  }

  // A session in which the test asks.
  Session asking(std::string_view secret = kSecret) {
    const Header hello = greeting();
    wire_->say(encode(hello));
    const Header challenge = wire_->hear(Kind::challenge);
    Session session(key_of(secret), 0, 1, hello.nonce, challenge.nonce);
    EXPECT_EQ(session.open(challenge), secret == kSecret);
    Header proof = proof_for(hello);
    wire_->say(session.seal(proof));
    return session;
  }
  // A session in which the test answers.
  Session answering(uint64_t progress = plan::kNever) {
    return answering_to(wire_->hear(Kind::hello), progress);
  }
  Session answering_to(const Header& hello, uint64_t progress = plan::kNever) {
    Header challenge;
    challenge.kind = Kind::challenge;
    challenge.to = 1;
    challenge.nonce = random_nonce();
    Session session(key_of(kSecret), 1, 0, hello.nonce, challenge.nonce);
    wire_->say(session.seal(challenge));
    EXPECT_TRUE(session.open(wire_->hear(Kind::proof)));
    Header welcome;
    welcome.kind = Kind::welcome;
    welcome.to = 1;
    welcome.progress = progress;
    wire_->say(session.seal(welcome));
    return session;
  }
  static Header message(Kind kind, uint64_t sample, uint64_t length = 0) {
    Header header;
    header.kind = kind;
    header.to = 1;
    header.sample = sample;
    header.length = length;
    return header;
  }
  Header push_of(uint64_t sample) {
    Header push = message(Kind::push, sample, sizes_[sample]);
    push.crc = crc32c(bytes_of(sample));
    return push;
  }
  static Header reply_to(const Header& fetch, const std::vector<std::byte>& bytes) {
    Header reply = message(Kind::reply, fetch.sample, bytes.size());
    reply.request = fetch.request;
    reply.crc = crc32c(bytes);
    return reply;
  }
  static Header greeting() {
    Header hello = message(Kind::hello, 77);
    hello.nonce = random_nonce();
    return hello;
  }
  static Header proof_for(const Header& hello) {
    Header proof = message(Kind::proof, 0);
    proof.nonce = hello.nonce;
    return proof;
  }
  bool refused(uint64_t count) {
    return eventually([&] { return exchange_->stats().refused == count; });
  }
  bool dropped() {
    return eventually([&] { return exchange_->stats().dropped_ranks == 1; });
  }
  bool reachable() {
    return eventually([&] { return exchange_->where(0, 1) == Where::there; });
  }
  bool alone() {
    return eventually([&] { return exchange_->nodes_alive() == 1; });
  }
  bool pushes_wanted() {
    return eventually([&] { return exchange_->push_wanted(0); });
  }
  std::shared_ptr<FetchGroup> begin_fetch(std::vector<std::byte>& into) {
    into.assign(sizes_[0], std::byte{0});
    return exchange_->begin({{0, into, nullptr, Outcome::waiting}});
  }
  bool push(uint64_t sample) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(sample));
    return exchange_->push(sample, *bytes, bytes, {});
  }
  void expect_fetched(Session& session) {
    std::vector<std::byte> into;
    const auto group = begin_fetch(into);
    const Header asked = wire_->hear(Kind::fetch);
    EXPECT_TRUE(session.open(asked));
    Header reply = reply_to(asked, bytes_of(0));
    wire_->say(session.seal(reply), bytes_of(0));
    exchange_->finish(*group, {});
    EXPECT_EQ(group->requests[0].outcome, Outcome::here);
    EXPECT_EQ(into, bytes_of(0));
  }
  std::vector<std::string> warnings() {
    const std::scoped_lock lock(mutex_);
    return warnings_;
  }

  std::shared_ptr<tier::NodeCache> cache_;
  std::unique_ptr<Exchange> exchange_;
  Wire* wire_ = nullptr;
};

TEST_F(HostileTest, WhoKnowsTheSecretIsServed) {
  start();
  put(*cache_, 1);
  Session session = asking();
  wire_->hear(Kind::welcome);
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
  Header push = push_of(3);
  wire_->say(session.seal(push), bytes_of(3));
  EXPECT_TRUE(refused(3));
  EXPECT_EQ(exchange_->stats().served, 0u);
  EXPECT_EQ(cache_->state(3), tier::State::empty);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, RepeatedMessagesAreRefused) {
  start();
  put(*cache_, 1);
  Session session = asking();
  wire_->hear(Kind::welcome);
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
  EXPECT_TRUE(eventually([&] { return !warnings().empty(); }));
  EXPECT_THAT(warnings(), Contains(HasSubstr("another plan")));
}

TEST_F(HostileTest, AMemberThatAsksForTheImpossibleIsDropped) {
  start();
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header fetch = message(Kind::fetch, kSamples);
  wire_->say(session.seal(fetch));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
}

TEST_F(HostileTest, APushOfWrongBytesIsDroppedAndLeavesTheSampleEmpty) {
  start();
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header push = push_of(1);
  push.crc ^= 1;
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(cache_->state(1), tier::State::empty);
}

TEST_F(HostileTest, APushOfAnotherLengthIsDropped) {
  start();
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header push = message(Kind::push, 1, 3);
  wire_->say(session.seal(push), std::vector<std::byte>(3));
  EXPECT_TRUE(dropped());
}

TEST_F(HostileTest, AFetchThatBringsBytesIsDropped) {
  start();
  put(*cache_, 1);
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header fetch = message(Kind::fetch, 1, 10);
  wire_->say(session.seal(fetch), std::vector<std::byte>(10));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(exchange_->stats().served, 0u);
}

TEST_F(HostileTest, AFileThatCannotBeReadIsAnsweredByNever) {
  start(2s, tier::TierKind::file);
  put(*cache_, 1);
  files_.errors["pread"] = EIO;
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header fetch = message(Kind::fetch, 1);
  wire_->say(session.seal(fetch));
  EXPECT_EQ(wire_->hear(Kind::reply).status, Status::never);
  EXPECT_EQ(cache_->state(1), tier::State::failed);
  EXPECT_THAT(warnings(), Contains(HasSubstr("Input/output error")));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(HostileTest, AFileThatCannotBeWrittenCostsTheSampleAlone) {
  start(2s, tier::TierKind::file);
  files_.errors["pwrite"] = EIO;
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header push = push_of(1);
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(eventually([&] { return cache_->state(1) == tier::State::failed; }));
  EXPECT_THAT(warnings(), Contains(HasSubstr("Input/output error; the sample is read from")));
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

class TierTest : public HostileTest, public testing::WithParamInterface<tier::TierKind> {};

TEST_P(TierTest, APushThatDoesNotMatchItsChecksumLeavesTheSampleEmpty) {
  start(2s, GetParam());
  Session session = asking();
  wire_->hear(Kind::welcome);
  Header push = push_of(1);
  push.crc ^= 1;
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(dropped());
  EXPECT_EQ(cache_->state(1), tier::State::empty);
}

TEST_P(TierTest, APushOfAnotherContentThanThisNodeReadIsNotTaken) {
  start(2s, GetParam());
  EXPECT_TRUE(cache_->sums().agrees(1, sample_sum(bytes_of(2))));
  Session session = asking();
  wire_->hear(Kind::welcome);
  for (const uint64_t sample : {1, 2}) {
    Header push = push_of(sample);
    wire_->say(session.seal(push), bytes_of(sample));
  }
  EXPECT_TRUE(eventually([&] { return cache_->state(2) == tier::State::ready; }));
  EXPECT_EQ(cache_->state(1), tier::State::empty);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

TEST_P(TierTest, WhatIsThereAlreadyOrNeverWillBeIsAnsweredAtOnce) {
  start(2s, GetParam());
  Session session = asking();
  wire_->hear(Kind::welcome);
  put(*cache_, 1);
  Header push = push_of(1);
  wire_->say(session.seal(push), bytes_of(1));
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
  Outcome ask(std::function<void(Session&, const Header&)> answer,
              std::chrono::milliseconds timeout = 2s) {
    start(timeout);
    Session session = answering();
    EXPECT_TRUE(reachable());
    const auto group = begin_fetch(into_);
    const Header fetch = wire_->hear(Kind::fetch);
    EXPECT_TRUE(session.open(fetch));
    answer(session, fetch);
    exchange_->finish(*group, {});
    return group->requests[0].outcome;
  }
  std::vector<std::byte> into_;
};

TEST_F(AnswerTest, TheRightBytesArrive) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              Header reply = reply_to(fetch, bytes_of(0));
              wire_->say(session.seal(reply), bytes_of(0));
            }),
            Outcome::here);
  EXPECT_EQ(into_, bytes_of(0));
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
              Header reply = reply_to(fetch, bytes_of(0));
              wire_->say(session.seal(reply), bytes_of(0));
            }),
            Outcome::here);
  EXPECT_EQ(into_, bytes_of(0));
  EXPECT_EQ(exchange_->stats().dropped_ranks, 0u);
}

TEST_F(AnswerTest, ASecondAnswerWhileTheFirstArrivesIsNotTaken) {
  EXPECT_EQ(ask([&](Session& session, const Header& fetch) {
              wire_->stalled = true;
              for (int i = 0; i < 2; ++i) {
                Header reply = reply_to(fetch, bytes_of(0));
                wire_->say(session.seal(reply), bytes_of(0));
              }
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
  EXPECT_EQ(ask([](Session&, const Header&) {}, 1s), Outcome::failed);
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

// What must not be waited for, and far less, which no machine is too slow for.
constexpr auto kLong = 3600s;
constexpr auto kHang = 100s;

// A process that was stopped keeps its connections.
class StallTest : public HostileTest {};

TEST_F(StallTest, ARankThatTakesNoPushIsDropped) {
  start(1s);
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  EXPECT_TRUE(eventually([&] { return exchange_->nodes_alive() == 1; }));
  EXPECT_FALSE(push(2));
}

TEST_F(StallTest, ARankThatNeverEndsAPushIsDropped) {
  start(1s);
  answering(0);
  Session session = asking();
  wire_->hear(Kind::welcome);
  wire_->stalled = true;
  Header push = push_of(1);
  wire_->say(session.seal(push), bytes_of(1));
  EXPECT_TRUE(eventually([&] { return exchange_->nodes_alive() == 1; }));
}

TEST_F(StallTest, TransfersUnderWayEndBeforeWhatTheyTouch) {
  start();
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  wire_->hear(Kind::push);
  exchange_.reset();
}

// All ranks of a node hang: a thread that needs a sample does not wait for each of them in turn, but
// ends while the second one has still time to be heard.
TEST_F(StallTest, ANodeThatHangsCostsOneTimeout) {
  start(3s, tier::TierKind::ram, 3);
  answering();
  ASSERT_TRUE(reachable());
  std::vector<std::byte> into;
  EXPECT_EQ(fetch(*exchange_, 0, into), Outcome::failed);
  EXPECT_EQ(exchange_->where(0, 1), Where::source);
  EXPECT_EQ(fetch(*exchange_, 0, into), Outcome::failed);
  EXPECT_EQ(exchange_->stats().dropped_ranks, 1u);
}

TEST_F(StallTest, AStopEndsWhatIsAsked) {
  start(kLong);
  Session session = answering();
  ASSERT_TRUE(reachable());
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  ASSERT_TRUE(session.open(wire_->hear(Kind::fetch)));
  std::stop_source stop;
  stop.request_stop();
  const auto begin = std::chrono::steady_clock::now();
  exchange_->finish(*group, stop.get_token());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
}

TEST_F(StallTest, AStopEndsWhatWaitsForAConnection) {
  start(kLong);
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  std::stop_source stop;
  stop.request_stop();
  const auto begin = std::chrono::steady_clock::now();
  exchange_->finish(*group, stop.get_token());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
}

TEST_F(StallTest, PushesToANodeThatIsNotThereYetCostNoTime) {
  start(kLong);
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
    std::vector<std::byte> into;
    ASSERT_TRUE(reachable());
    ASSERT_EQ(fetch(*exchange_, 0, into), Outcome::failed);
    ASSERT_TRUE(alone());
    ASSERT_EQ(exchange_->where(0, 1), Where::source);
  }
};

TEST_F(ReturnTest, ARankThatWasSilentIsAskedAgain) {
  start(600ms);
  answering();
  for (uint64_t times = 1; times <= 2; ++times) {
    lose();
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
  start(1s);
  put(*cache_, 1);
  answering();
  Session asks = asking();
  wire_->hear(Kind::welcome);
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
  start(1s);
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->stalled = true;
  EXPECT_TRUE(push(0));
  ASSERT_TRUE(alone());
  wire_->stalled = false;
  answering(0);
  ASSERT_TRUE(eventually([&] { return exchange_->nodes_alive() == 2; }));
  EXPECT_FALSE(eventually([&] { return exchange_->nodes_alive() == 1; }, 1s));
}

TEST_F(ReturnTest, AFetchThatStoodStillBeforeDoesNotCountAfterwards) {
  start(1s);
  Session session = answering();
  ASSERT_TRUE(reachable());
  wire_->stalled = true;
  std::vector<std::byte> into;
  const auto group = begin_fetch(into);
  const Header asked = wire_->hear(Kind::fetch);
  ASSERT_TRUE(session.open(asked));
  Header reply = reply_to(asked, bytes_of(0));
  wire_->say(session.seal(reply), bytes_of(0));
  ASSERT_TRUE(alone());
  wire_->stalled = false;
  // It knocks, so it is asked again at once, while the transfer has not been given up.
  asking();
  answering();
  exchange_->finish(*group, {});
  EXPECT_EQ(exchange_->stats().dropped_ranks, 1u);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
}

TEST_F(ReturnTest, APayloadThatWasNeverSentIsNotWaitedFor) {
  start(1s);
  answering(0);
  ASSERT_TRUE(pushes_wanted());
  wire_->out_of_memory = true;
  EXPECT_TRUE(push(0));
  ASSERT_TRUE(eventually([&] { return exchange_->stats().pushes_given_up == 1; }));
  wire_->out_of_memory = false;
  EXPECT_FALSE(eventually([&] { return exchange_->nodes_alive() == 1; }, 1s));
}

TEST_F(ReturnTest, ARankThatKnocksIsAskedAgainAtOnceAndServed) {
  start(600ms);
  answering();
  put(*cache_, 1);
  lose();
  Session asks = asking();
  wire_->hear(Kind::welcome);
  Header wanted = message(Kind::fetch, 1);
  wire_->say(asks.seal(wanted));
  EXPECT_EQ(wire_->hear(Kind::reply).status, Status::here);
  Session session = answering();
  ASSERT_TRUE(reachable());
  expect_fetched(session);
}

TEST_F(ReturnTest, WhatWasSaidBeforeItWasLostIsNotTakenAfterwards) {
  start(1s);
  Session old = answering();
  lose();
  Header welcome = message(Kind::welcome, 0);
  wire_->say(old.seal(welcome));
  EXPECT_TRUE(refused(1));
  EXPECT_EQ(exchange_->nodes_alive(), 1u);
}

TEST_F(ReturnTest, ARankThatBrokeTheRulesOrLeftIsNotTriedAgain) {
  for (const Kind kind : {Kind::fetch, Kind::leave}) {
    start(1s);
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
  start(600ms, tier::TierKind::ram, 1);
  answering();
  std::vector<std::byte> into;
  ASSERT_TRUE(reachable());
  ASSERT_EQ(fetch(*exchange_, 0, into), Outcome::failed);
  Header hello;
  do hello = wire_->hear(Kind::hello);
  while (hello.to != 2);
  EXPECT_EQ(exchange_->nodes_alive(), 2u);
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
