// A transport that a test speaks through, and whose clock it moves: no deadline is met but by that, on
// the slowest machine.
#pragma once

#include <gmock/gmock.h>

#include <condition_variable>
#include <deque>
#include <optional>
#include <set>

#include "base/crc32c.h"
#include "nodes.h"
#include "peer/session.h"

namespace nostall::peer {

using namespace std::chrono_literals;

// The deadline of the exchange's requests, and more than that.
inline constexpr auto kTimeout = 3600s;
inline constexpr auto kSilence = kTimeout + 1s;
// What must not be waited for takes less than this, on any machine.
inline constexpr auto kHang = 100s;

inline constexpr const char* kSecret = "the secret of this job";

// What rank 0 of the test sends to the exchange of rank 1, and what it hears.
class Wire final : public Transport {
 public:
  struct Message {
    std::vector<std::byte> header;
    std::vector<std::byte> payload;
    std::optional<uint32_t> gone = std::nullopt;  // no message: the transport has lost this rank
  };

  // As the contract says, what is under way ends before the transport does.
  ~Wire() override {
    for (const auto& done : held_) done(lands);
    for (const Message& late : too_late) {
      const Delivery delivery = receiver_->on_message(late.header, late.payload.size());
      EXPECT_TRUE(delivery.into.empty());
      EXPECT_FALSE(delivery.done);
    }
  }

  std::string address() override { return "wire"; }
  void connect(uint32_t rank, const std::string&) override {
    if (unreachable) throw Error(ErrorKind::peer, "no way to rank " + std::to_string(rank));
  }
  void send(uint32_t, const HeaderBytes& header, std::span<const std::byte> payload,
            std::function<void(bool)> done) override {
    if (out_of_memory) throw std::bad_alloc();
    {
      const std::scoped_lock lock(mutex_);
      heard_.push_back({{header.begin(), header.end()}, {payload.begin(), payload.end()}, {}});
    }
    if (done && stalled) {
      hold(std::move(done));
    } else if (done) {
      done(true);
    }
  }
  void drop(uint32_t) override {}
  bool progress(Receiver& receiver) override {
    receiver_ = &receiver;
    if (out_of_memory) throw std::bad_alloc();
    if (released_.exchange(false)) {
      for (const auto& done : std::exchange(held_, {})) done(false);
      return true;
    }
    Message message;
    {
      const std::scoped_lock lock(mutex_);
      if (to_come_.empty()) return false;
      message = std::move(to_come_.front());
      to_come_.pop_front();
    }
    if (message.gone) {
      receiver.on_gone(*message.gone, "its connection ended");
      return true;
    }
    const Delivery delivery = receiver.on_message(message.header, message.payload.size());
    const bool wanted = delivery.into.size() == message.payload.size() && !torn;
    if (wanted) std::copy(message.payload.begin(), message.payload.end(), delivery.into.begin());
    if (stalled && wanted && delivery.done) {
      hold(delivery.done);
      return true;
    }
    if (delivery.done) delivery.done(wanted);
    return true;
  }
  void wait(std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    ++waits_;
    const auto limit = ending ? 0ms : timeout;
    woken_.wait_for(lock, limit, [&] { return awake_ || !to_come_.empty(); });
    awake_ = false;
  }
  std::chrono::steady_clock::time_point now() const noexcept override {
    if (ending) passed_ += std::chrono::nanoseconds(1ms).count();
    return begun_ + std::chrono::nanoseconds(passed_);
  }

  // Time passes, which it does by this alone. The exchange has seen it, and done what was to be done then, when this returns.
  void pass(std::chrono::nanoseconds time) {
    passed_ += time.count();
    settle();
  }
  // Returns when the exchange has done what it was asked for, and has nothing left to do. It may
  // have been about to wait when it was asked, so the second wait counts.
  void settle() {
    const uint64_t before = waits_;
    wake();
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (waits_ < before + 2 && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
      wake();
    }
    EXPECT_GE(waits_, before + 2);
  }
  // Returns when so many payloads are under way for ever.
  void wait_for_held(uint64_t count) {
    const auto end = std::chrono::steady_clock::now() + 60s;
    while (holding_ < count && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(1ms);
    }
    EXPECT_EQ(holding_, count);
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
      to_come_.push_back({std::move(header), std::move(payload), {}});
    }
    woken_.notify_all();
  }
  // The payloads that were under way are known to be lost.
  void release() {
    released_ = true;
    wake();
  }
  // The transport notices that a rank is not there any more.
  void lose(uint32_t rank) {
    {
      const std::scoped_lock lock(mutex_);
      to_come_.push_back({{}, {}, rank});
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
  std::atomic<bool> lands{false};    // what is under way has arrived when the transport ends
  std::atomic<bool> torn{false};     // payloads that it is sent do not arrive
  std::atomic<bool> unreachable{false};
  std::atomic<bool> ending{false};  // time passes whenever it is looked at
  std::vector<Message> too_late;    // come while the transport ends

 private:
  void hold(std::function<void(bool)> done) {
    held_.push_back(std::move(done));
    ++holding_;
  }

  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  Receiver* receiver_ = nullptr;
  std::atomic<uint64_t> waits_{0}, holding_{0};
  std::atomic<bool> released_{false};
  mutable std::atomic<int64_t> passed_{0};       // nanoseconds
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
  void start(tier::TierKind kind = tier::TierKind::ram, uint32_t more_ranks_of_node_0 = 0) {
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
    config.timeout = kTimeout;
    cache_ = cache_of(1, kind, unplaced_);
    auto transport = std::make_unique<Wire>();
    wire_ = transport.get();
    plan::Ownership ownership = this->ownership(2);
    if (arrange_) arrange_(config, ownership);
    exchange_ = std::make_unique<Exchange>(std::move(transport), config, ownership, sizes_, cache_);
  }
  void TearDown() override {
    if (wire_ != nullptr) wire_->ending = true;
    wire_ = nullptr;
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
    challenge.from = hello.to;
    challenge.to = 1;
    challenge.nonce = random_nonce();
    Session session(key_of(kSecret), 1, hello.to, hello.nonce, challenge.nonce);
    wire_->say(session.seal(challenge));
    EXPECT_TRUE(session.open(wire_->hear(Kind::proof)));
    Header welcome;
    welcome.kind = Kind::welcome;
    welcome.from = hello.to;
    welcome.to = 1;
    welcome.progress = progress;
    wire_->say(session.seal(welcome));
    wire_->settle();
    return session;
  }
  // A session in which the exchange asks for sample 0, and what the test has heard of that.
  struct Asked {
    Session session;
    std::vector<std::byte> into;
    std::shared_ptr<FetchGroup> group;
    Header fetch;
  };
  Asked asked_session(uint32_t more_ranks_of_node_0 = 0) {
    start(tier::TierKind::ram, more_ranks_of_node_0);
    Asked asked{answering(), {}, {}, {}};
    EXPECT_TRUE(reachable());
    asked.group = begin_fetch(asked.into);
    asked.fetch = hear_fetch(asked.session);
    return asked;
  }
  Header hear_fetch(Session& session) {
    const Header fetch = wire_->hear(Kind::fetch);
    EXPECT_TRUE(session.open(fetch));
    return fetch;
  }
  void answer(Session& session, const Header& fetch) {
    Header reply = reply_to(fetch, bytes_of(fetch.sample));
    wire_->say(session.seal(reply), bytes_of(fetch.sample));
  }
  // A session in which the test asks, and may do so from now on.
  Session served() {
    Session session = asking();
    wire_->hear(Kind::welcome);
    return session;
  }
  void say_push(Session& session, uint64_t sample) {
    Header push = push_of(sample);
    wire_->say(session.seal(push), bytes_of(sample));
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
  // A fetch of sample 0 that the rank that is asked leaves without an answer.
  Outcome fetch_in_vain() {
    std::vector<std::byte> into;
    const auto group = begin_fetch(into);
    wire_->hear(Kind::fetch);
    wire_->pass(kSilence);
    return outcome_of(*group);
  }
  Outcome outcome_of(FetchGroup& group) {
    exchange_->finish(group, {});
    return group.requests[0].outcome;
  }
  bool push(uint64_t sample) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(sample));
    return exchange_->push(sample, *bytes, bytes, {});
  }
  void expect_fetched(Session& session) {
    std::vector<std::byte> into;
    const auto group = begin_fetch(into);
    answer(session, hear_fetch(session));
    EXPECT_EQ(outcome_of(*group), Outcome::here);
    EXPECT_EQ(into, bytes_of(0));
  }
  std::vector<std::string> warnings() {
    const std::scoped_lock lock(mutex_);
    return warnings_;
  }
  // A rank is counted, and its node seen as lost, before the warning of it is written.
  void expect_warning(const std::string& words) {
    const auto matcher = testing::Contains(testing::HasSubstr(words));
    eventually([&] { return testing::Matches(matcher)(warnings()); });
    EXPECT_THAT(warnings(), matcher);
  }

  std::function<void(ExchangeConfig&, plan::Ownership&)> arrange_;  // before the exchange begins
  std::set<uint64_t> unplaced_;  // samples without a place in the tier
  std::shared_ptr<tier::NodeCache> cache_;
  std::unique_ptr<Exchange> exchange_;
  Wire* wire_ = nullptr;
};

}  // namespace nostall::peer
