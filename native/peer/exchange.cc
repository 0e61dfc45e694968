// Checks the configuration of an exchange, and forwards its calls to the messenger.
#include "peer/exchange.h"

#include <string>
#include <utility>

#include "base/clock.h"
#include "peer/messenger.h"

namespace nostall::peer {

Exchange::Exchange(std::unique_ptr<Transport> transport, ExchangeConfig config,
                   plan::Ownership ownership, std::span<const uint64_t> sizes,
                   std::shared_ptr<tier::NodeCache> cache) {
  const size_t world = config.node_of_rank.size();
  if (config.rank >= world || config.addresses.size() != world) {
    throw Error(ErrorKind::usage, "an exchange of rank " + std::to_string(config.rank) +
                                      " in a world of " + std::to_string(world) +
                                      " needs an address for each rank, not " +
                                      std::to_string(config.addresses.size()));
  }
  if (ownership.owner.size() != sizes.size() || !cache || config.epoch_length == 0) {
    throw Error(ErrorKind::usage,
                "an exchange needs the node's tiers and an owner for each sample");
  }
  messenger_ = std::make_unique<Messenger>(std::move(transport), std::move(config),
                                           std::move(ownership), sizes, std::move(cache), events_);
}

Exchange::~Exchange() = default;

Where Exchange::where(uint64_t sample, uint32_t epoch) const noexcept {
  return messenger_->where(sample, epoch);
}
bool Exchange::push_wanted(uint64_t sample) const noexcept {
  return messenger_->push_wanted(sample);
}

void Exchange::try_again() { messenger_->try_again(); }

std::shared_ptr<FetchGroup> Exchange::begin(std::vector<Fetch> requests) {
  auto group = std::make_shared<FetchGroup>();
  group->requests = std::move(requests);
  {
    const MutexLock lock(group->mutex_);
    group->left_ = group->requests.size();
  }
  group->begun_ns_ = now_ns();
  messenger_->begin(group);
  return group;
}

void Exchange::finish(FetchGroup& group, std::stop_token stop) {
  messenger_->finish(group, std::move(stop));
}

bool Exchange::push(uint64_t sample, std::span<const std::byte> bytes, std::shared_ptr<void> keep,
                    std::stop_token stop) {
  return messenger_->push(sample, bytes, std::move(keep), std::move(stop));
}

void Exchange::wait_for_progress(std::chrono::nanoseconds timeout, std::stop_token stop) {
  messenger_->wait_for_progress(timeout, std::move(stop));
}

const plan::Ownership& Exchange::ownership() const noexcept { return messenger_->ownership(); }
std::span<const uint32_t> Exchange::node_of_rank() const noexcept {
  return messenger_->node_of_rank();
}
std::span<const uint64_t> Exchange::owned() const noexcept { return messenger_->owned(); }

ExchangeStats Exchange::stats() const { return messenger_->stats(); }
uint32_t Exchange::nodes() const noexcept { return messenger_->nodes(); }
uint32_t Exchange::nodes_alive() const noexcept { return messenger_->nodes_alive(); }

}  // namespace nostall::peer
