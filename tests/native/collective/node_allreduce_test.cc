// The allreduce between nodes, over a network in memory that delivers in any order.
#include "collective/node_allreduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>

namespace nostall::collective {
namespace {

// A network in this process: messages travel when the test says so, and are read only then, so a
// sender that overwrites what is on its way is found out.
class Network {
 public:
  struct Sent {
    const void* data;
    uint64_t bytes;
  };
  struct Wanted {
    void* data;
    uint64_t bytes, cookie;
  };
  using Key = std::tuple<uint32_t, uint32_t, uint32_t>;  // from, to, tag
  std::map<Key, std::deque<Sent>> sent;
  std::map<Key, std::deque<Wanted>> wanted;
  uint64_t bytes_out = 0;  // of the rank that is watched
  uint32_t watched = ~0U;

  std::vector<Key> ready() const {
    std::vector<Key> found;
    for (const auto& [key, messages] : sent) {
      const auto at = wanted.find(key);
      if (!messages.empty() && at != wanted.end() && !at->second.empty()) found.push_back(key);
    }
    return found;
  }
  bool empty() const {
    const auto none = [](const auto& entry) { return entry.second.empty(); };
    return std::all_of(sent.begin(), sent.end(), none) &&
           std::all_of(wanted.begin(), wanted.end(), none);
  }
};

class TestMessages final : public Messages {
 public:
  TestMessages(Network& network, uint32_t me) : network_(network), me_(me) {}
  void send(uint32_t to, uint32_t tag, const void* data, uint64_t bytes) override {
    network_.sent[{me_, to, tag}].push_back({data, bytes});
    if (me_ == network_.watched) network_.bytes_out += bytes;
  }
  void receive(uint32_t from, uint32_t tag, void* data, uint64_t bytes, uint64_t cookie) override {
    network_.wanted[{from, me_, tag}].push_back({data, bytes, cookie});
  }
  void fold(std::byte* into, const std::byte* from, uint64_t count, bool first) override {
    auto* const sum = reinterpret_cast<float*>(into);
    const auto* const more = reinterpret_cast<const float*>(from);
    for (uint64_t i = 0; i < count; ++i) sum[i] = first ? more[i] : sum[i] + more[i];
  }
  void copy(std::byte* into, const std::byte* from, uint64_t bytes) override {
    if (bytes > 0) std::memcpy(into, from, bytes);
  }
  std::byte* scratch(uint64_t bytes) override {
    return reinterpret_cast<std::byte*>(memory_.emplace_back(bytes / 4 + 1).data());
  }

 private:
  Network& network_;
  const uint32_t me_;
  std::deque<std::vector<float>> memory_;
};

struct Rank {
  std::vector<float> in, out;
  std::unique_ptr<TestMessages> messages;
  std::unique_ptr<NodeAllreduce> allreduce;
  std::vector<uint32_t> finished;
  bool here = false;
  uint32_t next = 0;  // chunk to be ready
};

class Cluster {
 public:
  Cluster(NodeAllreduceShape shape, uint64_t seed) : shape_(shape), random_(seed) {
    shape_.element = sizeof(float);
    ranks_.resize(shape.ranks);
    for (uint32_t p = 0; p < shape.ranks; ++p) {
      Rank& rank = ranks_[p];
      rank.in.resize(shape.count);
      for (uint64_t i = 0; i < shape.count; ++i) rank.in[i] = value(p, i);
      rank.out.assign(shape.count, -1.0F);
      rank.messages = std::make_unique<TestMessages>(network_, p);
      shape_.rank = p;
      rank.allreduce = std::make_unique<NodeAllreduce>(
          shape_, *rank.messages, reinterpret_cast<const std::byte*>(rank.in.data()),
          reinterpret_cast<std::byte*>(rank.out.data()),
          [&rank](uint32_t chunk) { rank.finished.push_back(chunk); });
    }
  }
  // Fractions whose sums depend on the order of adding.
  static float value(uint32_t rank, uint64_t i) {
    return 1.0F / static_cast<float>(3 + rank * 7 + i % 11);
  }
  Network& network() { return network_; }
  Rank& rank(uint32_t p) { return ranks_[p]; }

  void arrive(uint32_t p) {
    Rank& rank = ranks_[p];
    rank.allreduce->listen();
    for (bool more = true; more;) {
      more = false;
      for (const Network::Key& key : network_.ready()) {
        if (std::get<1>(key) == p) {
          deliver(key);
          more = true;
          break;
        }
      }
    }
    rank.here = true;
    rank.allreduce->announce();
  }
  void bring_all(uint32_t p) {
    while (ranks_[p].next < shape_.chunks) ranks_[p].allreduce->ready(ranks_[p].next++);
  }
  void deliver(const Network::Key& key) {
    const Network::Sent sent = network_.sent[key].front();
    const Network::Wanted wanted = network_.wanted[key].front();
    network_.sent[key].pop_front();
    network_.wanted[key].pop_front();
    ASSERT_LE(sent.bytes, wanted.bytes);
    if (sent.bytes > 0) std::memcpy(wanted.data, sent.data, sent.bytes);
    ranks_[std::get<1>(key)].allreduce->received(wanted.cookie, sent.bytes);
  }
  bool deliver_any() {
    const auto ready = network_.ready();
    if (ready.empty()) return false;
    deliver(ready[random_() % ready.size()]);
    return true;
  }
  void deliver_all() {
    while (deliver_any()) {
    }
  }
  // Arrivals in this order, everything else whenever it may happen.
  void run(const std::vector<uint32_t>& order, bool hurry) {
    size_t arrived = 0;
    for (;;) {
      std::vector<uint32_t> can_bring;
      for (uint32_t p = 0; p < shape_.ranks; ++p) {
        if (ranks_[p].here && ranks_[p].next < shape_.chunks) can_bring.push_back(p);
      }
      const uint64_t choice = random_() % 4;
      if (arrived < order.size() && (choice == 0 || hurry)) {
        arrive(order[arrived++]);
      } else if (!can_bring.empty() && choice == 1) {
        Rank& rank = ranks_[can_bring[random_() % can_bring.size()]];
        rank.allreduce->ready(rank.next++);
      } else if (!deliver_any() && can_bring.empty()) {
        if (arrived == order.size()) return;
        arrive(order[arrived++]);
      }
    }
  }
  void check() {
    for (Rank& rank : ranks_) {
      ASSERT_TRUE(rank.allreduce->done());
      std::sort(rank.finished.begin(), rank.finished.end());
      std::vector<uint32_t> all(shape_.chunks);
      std::iota(all.begin(), all.end(), 0U);
      ASSERT_EQ(rank.finished, all);
      // All have the same, and the right sum.
      ASSERT_EQ(rank.out, ranks_[0].out);
    }
    for (uint64_t i = 0; i < shape_.count; ++i) {
      float sum = 0, in_order = value(0, i);
      for (uint32_t p = 0; p < shape_.ranks; ++p) sum += value(p, i);
      for (uint32_t p = 1; p < shape_.ranks; ++p) in_order += value(p, i);
      if (shape_.in_order) {
        ASSERT_EQ(ranks_[0].out[i], in_order) << i;
      } else {
        ASSERT_NEAR(ranks_[0].out[i], sum, 1e-5F) << i;
      }
    }
    ASSERT_TRUE(network_.empty());
  }

 private:
  NodeAllreduceShape shape_;
  Network network_;
  std::vector<Rank> ranks_;
  std::mt19937_64 random_;
};

TEST(NodeAllreduce, AddsUpInEveryOrderOfArrival) {
  std::vector<uint32_t> order{0, 1, 2, 3};
  uint64_t seed = 0;
  do {
    for (const uint32_t late : {0U, 1U, 2U}) {
      NodeAllreduceShape shape;
      shape.ranks = 4;
      shape.count = 57;
      shape.chunks = 2;
      shape.late = late;
      Cluster cluster(shape, ++seed);
      cluster.run(order, seed % 3 == 0);
      ASSERT_NO_FATAL_FAILURE(cluster.check()) << "seed " << seed;
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(NodeAllreduce, AnyShapeAndAnyInterleaving) {
  std::mt19937_64 random(7);
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    NodeAllreduceShape shape;
    shape.ranks = 1 + static_cast<uint32_t>(random() % 9);
    shape.count = random() % 3 == 0 ? random() % 5 : random() % 400;
    shape.chunks = 1 + static_cast<uint32_t>(random() % 4);
    shape.late = static_cast<uint32_t>(random() % 3);
    shape.in_order = random() % 2 == 0;
    std::vector<uint32_t> order(shape.ranks);
    std::iota(order.begin(), order.end(), 0U);
    std::shuffle(order.begin(), order.end(), random);
    Cluster cluster(shape, seed);
    cluster.run(order, random() % 4 == 0);
    ASSERT_NO_FATAL_FAILURE(cluster.check())
        << "seed " << seed << ": " << shape.ranks << " ranks, " << shape.count << " elements, "
        << shape.chunks << " chunks, " << shape.late << " late, in order " << shape.in_order;
  }
}

// The point of it: what the last rank's link carries after its arrival.
TEST(NodeAllreduce, TheLastRankSendsItsMessageOnce) {
  NodeAllreduceShape shape;
  shape.ranks = 8;
  shape.count = 8 * 64;
  Cluster cluster(shape, 1);
  for (uint32_t p = 0; p < 7; ++p) {
    cluster.arrive(p);
    cluster.bring_all(p);
    cluster.deliver_all();
  }
  cluster.network().watched = 7;
  cluster.arrive(7);
  cluster.bring_all(7);
  cluster.deliver_all();
  ASSERT_NO_FATAL_FAILURE(cluster.check());
  EXPECT_TRUE(cluster.rank(0).allreduce->late()[7]);
  EXPECT_LE(cluster.network().bytes_out, shape.count * 4 + 8 * 8);  // and its announcements
}

// Its ranks were there, but its node's sum comes last: its share goes out in pieces.
TEST(NodeAllreduce, ASumThatComesLastIsHandedOnByOthers) {
  NodeAllreduceShape shape;
  shape.ranks = 8;
  shape.count = 8 * 64;
  shape.late = 0;
  Cluster cluster(shape, 1);
  for (uint32_t p = 0; p < 8; ++p) cluster.arrive(p);
  for (uint32_t p = 1; p < 8; ++p) cluster.bring_all(p);
  cluster.deliver_all();
  cluster.network().watched = 0;
  cluster.bring_all(0);
  cluster.deliver_all();
  ASSERT_NO_FATAL_FAILURE(cluster.check());
  // Its contributions to seven shares, its own share once, and a piece of none.
  EXPECT_LE(cluster.network().bytes_out, shape.count * 4);
}

TEST(LateRanks, AreThoseThatFewHaveSeen) {
  const auto seen_in_order = [](size_t ranks) {
    std::vector<std::vector<bool>> seen(ranks, std::vector<bool>(ranks, false));
    for (size_t i = 0; i < ranks; ++i) {
      for (size_t j = 0; j < i; ++j) seen[i][j] = true;
    }
    return seen;
  };
  EXPECT_EQ(late_ranks(seen_in_order(4), 1), (std::vector<bool>{false, false, false, true}));
  EXPECT_EQ(late_ranks(seen_in_order(6), 2),
            (std::vector<bool>{false, false, false, false, true, true}));
  EXPECT_EQ(late_ranks(seen_in_order(4), 0), std::vector<bool>(4, false));
  // All at once: no rank is last.
  EXPECT_EQ(late_ranks(std::vector<std::vector<bool>>(4, std::vector<bool>(4, false)), 1),
            std::vector<bool>(4, false));
}

}  // namespace
}  // namespace nostall::collective
