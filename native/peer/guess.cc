// The heuristic, over the states of this node's own samples.
#include "peer/guess.h"

#include <utility>

namespace nostall::peer {

Guess::Guess(plan::Copies copies, std::vector<std::vector<plan::SampleId>> fill,
             std::shared_ptr<tier::NodeCache> cache)
    : copies_(std::move(copies)), cache_(std::move(cache)) {
  const MutexLock lock(mutex_);
  for (std::vector<plan::SampleId>& samples : fill) tiers_.push_back({std::move(samples), 0});
}

bool Guess::there(plan::SampleId sample) {
  if (copies_.node[sample] == plan::kNoOwner) return false;
  const MutexLock lock(mutex_);
  const size_t tier = copies_.tier[sample];
  if (tier >= tiers_.size()) return true;
  Filling& own = tiers_[tier];
  const auto settled = [&](plan::SampleId s) {
    const tier::State state = cache_->state(s);
    return state == tier::State::ready || state == tier::State::failed || !cache_->placed(s);
  };
  while (own.reached < own.samples.size() && settled(own.samples[own.reached])) ++own.reached;
  return own.reached == own.samples.size() || own.reached > copies_.place[sample] + kGuessAhead;
}

}  // namespace nostall::peer
