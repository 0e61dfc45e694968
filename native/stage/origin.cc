// The running estimate of an origin's speed, and the choice among origins.
#include "stage/origin.h"

#include <algorithm>

#include "base/clock.h"

namespace nostall::stage {
namespace {

// A measurement counts as at most this many times slower than expected. It may have waited for a
// process that was not scheduled; if the origin is really slow, the next ones show it too.
constexpr double kMostAtOnce = 16.0;

}  // namespace

void SpeedEstimate::record(uint64_t bytes, int64_t nanoseconds) noexcept {
  if (bytes == 0 || nanoseconds <= 0) return;
  const int64_t now = now_ns();
  const int64_t age = now - recorded_.exchange(now, std::memory_order_relaxed);
  tried_.store(now, std::memory_order_relaxed);
  const double weight =
      std::clamp(static_cast<double>(age) / static_cast<double>(kMemoryNs), 1.0 / 16.0, 1.0);
  const double seen = static_cast<double>(nanoseconds) * 1e-9 / static_cast<double>(bytes);
  double old = value_.load(std::memory_order_relaxed);
  double next = 0.0;
  do {
    next = old == 0.0 ? seen : old + (std::min(seen, kMostAtOnce * old) - old) * weight;
  } while (!value_.compare_exchange_weak(old, next, std::memory_order_relaxed));
}

bool SpeedEstimate::stale(int64_t nanoseconds) noexcept {
  int64_t tried = tried_.load(std::memory_order_relaxed);
  const int64_t now = now_ns();
  return tried != 0 && now - tried > nanoseconds && tried_.compare_exchange_strong(tried, now);
}

bool worth_pushing(double peer_seconds_per_byte, double source_seconds_per_byte) noexcept {
  return peer_seconds_per_byte == 0.0 || source_seconds_per_byte == 0.0 ||
         peer_seconds_per_byte <= kSourceAdvantageOverPeers * source_seconds_per_byte;
}

Choice choose(const std::array<Candidate, kOrigins>& candidates) noexcept {
  const auto at = [&](Origin o) -> const Candidate& { return candidates[static_cast<size_t>(o)]; };
  if (at(Origin::ram).available) return {Origin::ram, "in the RAM tier"};
  Choice best{Origin::source, "in no tier"};
  for (const auto& [origin, reason] :
       {Choice{Origin::file, "in the file tier"}, Choice{Origin::peer, "in a tier of its owner"}}) {
    const Candidate& candidate = at(origin);
    if (!candidate.available) continue;
    if (best.origin == Origin::source) {
      best = {origin, reason};
    } else if (const double best_cost = at(best.origin).seconds_per_byte;
               best_cost > 0.0 && candidate.seconds_per_byte > 0.0 &&
               candidate.seconds_per_byte < best_cost) {
      best = {origin, "its owner is faster than the file tier"};
    }
  }
  const double source = at(Origin::source).seconds_per_byte;
  const double cost = at(best.origin).seconds_per_byte;
  const double advantage =
      best.origin == Origin::peer ? kSourceAdvantageOverPeers : kSourceAdvantage;
  if (best.origin != Origin::source && at(Origin::source).available && source > 0.0 && cost > 0.0 &&
      cost > advantage * source) {
    return {Origin::source, "the source is faster than the tiers"};
  }
  return best;
}

}  // namespace nostall::stage
