// Nodes are communicators of threads; their local leaders meet in one more communicator.
#include "collective/two_level.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "ranks.h"

namespace nostall::collective::testing {
namespace {

// An allreduce of each part at once, on a communicator of the leaders; fails in `fails_in`.
class CommunicatorLeaders final : public Leaders {
 public:
  explicit CommunicatorLeaders(Communicator& among, uint32_t fails_in = ~uint32_t{0})
      : among_(among), fails_in_(fails_in) {}
  std::byte* begin(const TwoLevelMessage& message) override {
    message_ = message;
    sums_.resize(message.offset(message.count));
    return sums_.data();
  }
  void start(uint32_t part) override {
    if (part == fails_in_) throw Error(ErrorKind::peer, "the network is down");
    started_.push_back(part);
  }
  void finish(uint32_t part) override {
    ASSERT_EQ(started_.at(part), part);
    const Extent extent = message_.part(part);
    const uint64_t at = message_.offset(extent.begin);
    among_.allreduce(sums_.data() + at, message_.out + at, extent.count, *message_.reducer);
  }
  void end() override { ended = true; }
  bool ended = false;

 private:
  Communicator& among_;
  const uint32_t fails_in_;
  TwoLevelMessage message_;
  std::vector<std::byte> sums_;
  std::vector<uint32_t> started_;
};

// Runs `body(node communicator, leaders' communicator or null, rank of the job)` on all ranks of
// nodes of these sizes; what each threw.
template <typename Body>
std::vector<std::string> run_nodes(const std::vector<uint32_t>& sizes, const Body& body) {
  const std::string job = fresh_job();
  const auto nodes = static_cast<uint32_t>(sizes.size());
  std::vector<std::string> errors(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
  std::vector<std::thread> threads;
  uint32_t rank = 0;
  for (uint32_t node = 0; node < nodes; ++node) {
    for (uint32_t local = 0; local < sizes[node]; ++local, ++rank) {
      threads.emplace_back([&, node, local, rank] {
        try {
          Communicator own(config_of(job + " node " + std::to_string(node), local, sizes[node]));
          std::unique_ptr<Communicator> among;
          if (local == 0) {
            among = std::make_unique<Communicator>(config_of(job + " leaders", node, nodes));
          }
          body(own, among.get(), rank);
        } catch (const Error& error) {
          errors[rank] = error.what();
        }
      });
    }
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

TEST(TwoLevel, SumsOverNodesOfAllSizes) {
  const std::vector<uint32_t> sizes{2, 1, 3};
  const auto errors = run_nodes(sizes, [](Communicator& node, Communicator* among, uint32_t rank) {
    const Reducer sum(Op::sum, DataType::int64);
    for (const uint64_t count : {uint64_t{0}, uint64_t{1}, uint64_t{5}, uint64_t{70'001}}) {
      for (const uint32_t parts : {1U, 4U}) {
        std::vector<int64_t> in(count), out(count, -1);
        for (uint64_t i = 0; i < count; ++i) in[i] = static_cast<int64_t>(i) * (rank + 1);
        const auto* from = reinterpret_cast<const std::byte*>(in.data());
        for (auto* to : {reinterpret_cast<std::byte*>(out.data()), const_cast<std::byte*>(from)}) {
          std::optional<CommunicatorLeaders> leaders;
          if (among != nullptr) leaders.emplace(*among);
          two_level_allreduce(node, leaders ? &*leaders : nullptr, {from, to, count, &sum, parts});
          const auto* got = reinterpret_cast<const int64_t*>(to);
          for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(got[i], static_cast<int64_t>(i) * 21);
          ASSERT_TRUE(!leaders || count == 0 || leaders->ended);
        }
      }
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(TwoLevel, OrderWithinANodeCanBeFixed) {
  // Only ((a + b) + c) keeps the 1.
  const auto errors = run_nodes({3, 1}, [](Communicator& node, Communicator* among, uint32_t rank) {
    const Reducer sum(Op::sum, DataType::float32);
    const float mine[] = {1e30F, -1e30F, 1.0F, 2.0F};
    std::vector<float> data(10'000, mine[rank]);
    auto* const place = reinterpret_cast<std::byte*>(data.data());
    std::optional<CommunicatorLeaders> leaders;
    if (among != nullptr) leaders.emplace(*among);
    two_level_allreduce(node, leaders ? &*leaders : nullptr, {place, place, data.size(), &sum, 2},
                        {.order = Order::fixed});
    for (const float value : data) ASSERT_EQ(value, 3.0F);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(TwoLevel, WhatALeaderThrowsIsThrownOnItsNode) {
  const auto errors = run_nodes({3, 1}, [](Communicator& node, Communicator* among, uint32_t rank) {
    if (rank == 3) return;  // the other node takes no part: the leader fails before it is needed
    const Reducer sum(Op::sum, DataType::int64);
    std::vector<int64_t> data(10'000);
    auto* const place = reinterpret_cast<std::byte*>(data.data());
    std::optional<CommunicatorLeaders> leaders;
    if (among != nullptr) leaders.emplace(*among, 1);
    two_level_allreduce(node, leaders ? &*leaders : nullptr, {place, place, data.size(), &sum, 3});
  });
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_NE(errors[rank].find("the network is down"), std::string::npos) << errors[rank];
  }
}

// Leaders that wait for other nodes for as long as `wait` does.
class WaitingLeaders final : public Leaders {
 public:
  explicit WaitingLeaders(std::function<void()> wait) : wait_(std::move(wait)) {}
  std::byte* begin(const TwoLevelMessage& message) override { return message.out; }
  void start(uint32_t) override {}
  void finish(uint32_t) override { wait_(); }

 private:
  const std::function<void()> wait_;
};

// What the two ranks of a node get whose timeout is 3 s, if its leader waits in `wait`. That is longer
// than either of them is late on a busy machine.
std::vector<std::string> waiting(const std::function<void(Communicator&)>& wait) {
  return run_nodes({2}, [&](Communicator& node, Communicator* among, uint32_t) {
    const Reducer sum(Op::sum, DataType::int64);
    std::vector<int64_t> data(10'000);
    auto* const place = reinterpret_cast<std::byte*>(data.data());
    node.set_timeout(std::chrono::seconds(3));
    WaitingLeaders leaders([&] { wait(node); });
    two_level_allreduce(node, among != nullptr ? &leaders : nullptr,
                        {place, place, data.size(), &sum, 2});
  });
}

TEST(TwoLevel, ALeaderThatWaitsForOtherNodesSaysItselfWhatIsMissing) {
  const auto errors = waiting([](Communicator&) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
    throw Error(ErrorKind::peer, "node 1 did not come");
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("node 1 did not come"), std::string::npos) << error;
  }
}

TEST(TwoLevel, OtherNodesMayComeLate) {
  const auto errors =
      waiting([](Communicator&) { std::this_thread::sleep_for(std::chrono::seconds(4)); });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
}

TEST(TwoLevel, ALeaderThatNeverReturnsIsAnError) {
  const auto errors = waiting([](Communicator& node) {
    for (;;) {
      node.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  });
  EXPECT_NE(errors[0].find("rank 1 waited 3.0000 s"), std::string::npos) << errors[0];
  EXPECT_NE(errors[1].find("rank 1 waited 3.0000 s in broadcast (call 3) for ranks that have not "
                           "arrived: 0"),
            std::string::npos)
      << errors[1];
}

// Rank 1 waits for the first part of call 1 until the leader, which has completed that call, fails in
// call 2.
TEST(TwoLevel, ALeaderThatFailsLeavesTheCallsThatItCompletedWhole) {
  class FailingLeaders final : public Leaders {
   public:
    explicit FailingLeaders(std::function<void()> wait) : wait_(std::move(wait)) {}
    std::byte* begin(const TwoLevelMessage& message) override {
      if (calls_++ > 0) throw Error(ErrorKind::peer, "the network is down");
      return message.out;
    }
    void start(uint32_t) override {}
    void finish(uint32_t) override { wait_(); }

   private:
    const std::function<void()> wait_;
    int calls_ = 0;
  };
  const std::string job = fresh_job();
  std::atomic<bool> reduced = false, waits = false, failed = false;
  std::vector<int> completed(2);
  std::vector<std::string> told(2);
  const auto run = [&](uint32_t rank) {
    CommunicatorConfig config = config_of(job, rank, 2);
    if (rank == 1) {
      config.progress = [&] {
        if (!reduced) return;
        waits = true;
        waits.notify_all();
        failed.wait(false);
      };
    }
    Communicator node(config);
    const Reducer sum(Op::sum, DataType::int64);
    std::vector<int64_t> data(1000, 1);
    auto* const place = reinterpret_cast<std::byte*>(data.data());
    FailingLeaders leaders([&] {
      reduced = true;
      waits.wait(false);
    });
    try {
      for (;; ++completed[rank]) {
        two_level_allreduce(node, rank == 0 ? &leaders : nullptr,
                            {place, place, data.size(), &sum, 2});
        EXPECT_EQ(data.back(), 2);
      }
    } catch (const Error& error) {
      told[rank] = error.what();
    }
    failed = true;
    failed.notify_all();
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  EXPECT_EQ(completed, (std::vector<int>{1, 1}));
  for (const std::string& error : told) {
    EXPECT_NE(error.find("the network is down"), std::string::npos) << error;
  }
}

TEST(TwoLevel, PartsAreBounded) {
  EXPECT_EQ(parts_of(0, 100, 8), 1U);
  EXPECT_EQ(parts_of(399, 100, 8), 3U);
  EXPECT_EQ(parts_of(10'000, 100, 8), 8U);
}

}  // namespace
}  // namespace nostall::collective::testing
