// Progressive filling. All open flows have the same rate, which rises until a resource is full or a
// flow reaches its cap; those flows are frozen at that rate, and the rest goes on.
#include "simulate/share.h"

#include <algorithm>
#include <limits>

namespace nostall::simulate {

void Sharing::share(std::span<Flow> flows, std::span<const double> capacity) {
  left_.assign(capacity.begin(), capacity.end());
  weight_.assign(capacity.size(), 0);
  open_.clear();
  for (uint32_t f = 0; f < flows.size(); ++f) {
    flows[f].rate = 0;
    if (flows[f].cap <= 0) continue;
    open_.push_back(f);
    for (const auto& [resource, amount] : flows[f].demand) weight_[resource] += amount;
  }
  const auto freeze = [&](Flow& flow, double rate) {
    flow.rate = rate;
    for (const auto& [resource, amount] : flow.demand) {
      left_[resource] = std::max(0.0, left_[resource] - rate * amount);
      weight_[resource] -= amount;
    }
  };
  // What is left of a weight after all its flows are frozen is rounding.
  constexpr double kNothing = 1e-9;
  while (!open_.empty()) {
    double level = std::numeric_limits<double>::infinity();
    for (size_t r = 0; r < left_.size(); ++r) {
      if (weight_[r] > kNothing) level = std::min(level, left_[r] / weight_[r]);
    }
    // Flows with a lower cap come first: they leave the others more.
    const size_t before = open_.size();
    std::erase_if(open_, [&](uint32_t f) {
      if (flows[f].cap > level) return false;
      freeze(flows[f], flows[f].cap);
      return true;
    });
    if (open_.size() < before) continue;
    std::erase_if(open_, [&](uint32_t f) {
      const bool full =
          std::any_of(flows[f].demand.begin(), flows[f].demand.end(), [&](const Demand& demand) {
            const double weight = weight_[demand.first];
            return weight > kNothing && left_[demand.first] <= level * weight * (1 + 1e-9);
          });
      if (full) freeze(flows[f], level);
      return full;
    });
    if (open_.size() == before) {
      for (const uint32_t f : open_) flows[f].rate = std::min(level, flows[f].cap);
      return;
    }
  }
}

}  // namespace nostall::simulate
