// The collectives of several nodes. Gradients go through a communicator of the node and a network
// of the local leaders; control goes through that network among all ranks.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "collective/communicator.h"
#include "sync/collectives.h"

namespace nostall::sync {
namespace {

using collective::DataType;

// Small enough that the first part is under way between nodes while the node reduces the next one,
// large enough that starting it costs little beside sending it.
constexpr uint64_t kPartBytes = 4 << 20;
constexpr uint32_t kMostParts = 1024;

class TwoLevelCollectives : public Collectives {
 public:
  TwoLevelCollectives(const NodeCollectivesConfig& config, std::unique_ptr<Network> network)
      : network_(std::move(network)), node_(config_of(config)), fixed_order_(config.fixed_order) {}

  uint32_t rank() const override { return network_->rank(); }
  uint32_t ranks() const override { return network_->ranks(); }
  void* allocate(uint64_t bytes) override {
    return is_leader() ? network_->allocate(bytes) : nullptr;
  }
  void release(void* data) noexcept override { network_->release(data); }

  void allreduce(void* data, uint64_t count, DataType type) override {
    collective::CallOptions options;
    if (fixed_order_) options.order = collective::Order::fixed;
    const collective::Reducer sum(collective::Op::sum, type);
    auto* const place = static_cast<std::byte*>(data);
    const uint32_t parts =
        collective::parts_of(count * sum.element_bytes(), kPartBytes, kMostParts);
    const auto leaders = is_leader() ? network_->leaders(type) : nullptr;
    try {
      two_level_allreduce(node_, leaders.get(), {place, place, count, &sum, parts}, options);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::peer) throw;
      throw Error(ErrorKind::peer, error.what() + of_this_node());
    }
  }

  void all_and(std::span<uint64_t> words) override {
    for (const auto& other : all_gather(std::as_bytes(words))) {
      for (size_t i = 0; i < words.size() && (i + 1) * sizeof(uint64_t) <= other.size(); ++i) {
        uint64_t word = 0;
        std::memcpy(&word, other.data() + i * sizeof word, sizeof word);
        words[i] &= word;
      }
    }
  }
  int64_t all_min(int64_t value) override {
    for (const auto& other : all_gather(std::as_bytes(std::span(&value, 1)))) {
      int64_t theirs = value;
      if (other.size() == sizeof theirs) std::memcpy(&theirs, other.data(), sizeof theirs);
      value = std::min(value, theirs);
    }
    return value;
  }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) override {
    return network_->all_gather(bytes);
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) override {
    return network_->broadcast(bytes, root);
  }
  void start_and(std::span<uint64_t>) override {
    throw Error(ErrorKind::usage, "nonblocking agreement works between the ranks of one node only");
  }
  bool test() override { return true; }
  void end(const Error& why) noexcept override {
    node_.end(why);
    network_->end();
  }
  void hang_up() noexcept override { network_->end(); }
  int64_t own_cpu_ns() const override { return 0; }
  int64_t waited_ns() const override { return node_.stats().wait_ns; }
  bool may_wait_elsewhere(uint32_t rank) const override { return rank == network_->node().front(); }
  void on_late(std::chrono::nanoseconds after,
               std::function<void(std::span<const uint32_t>)> callback) override {
    node_.on_late(after, [this, callback = std::move(callback)](std::span<const uint32_t> local) {
      std::vector<uint32_t> missing;
      for (const uint32_t rank : local) missing.push_back(network_->node()[rank]);
      callback(missing);
    });
  }

 private:
  static collective::CommunicatorConfig config_of(const NodeCollectivesConfig& config) {
    collective::CommunicatorConfig c;
    c.job = config.job;
    c.rank = config.rank;
    c.ranks = config.ranks;
    c.arena_bytes = 1 << 20;  // gradients lie in memory of the network
    c.timeout = config.timeout;
    return c;
  }
  bool is_leader() const noexcept { return node_.rank() == 0; }
  // The communicator numbers the ranks of the node from 0.
  std::string of_this_node() const {
    std::string ranks;
    for (const uint32_t rank : network_->node()) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
    }
    return " (in numbers of this node, whose ranks are " + ranks + " of all)";
  }

  const std::unique_ptr<Network> network_;
  collective::Communicator node_;
  const bool fixed_order_;
};

}  // namespace

std::unique_ptr<Collectives> make_two_level_collectives(const NodeCollectivesConfig& config,
                                                        std::unique_ptr<Network> network) {
  return std::make_unique<TwoLevelCollectives>(config, std::move(network));
}

}  // namespace nostall::sync
