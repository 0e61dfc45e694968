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
  double first = 0.0;
  if (first_.compare_exchange_strong(first, seen, std::memory_order_relaxed)) return;
  const bool second = !known_.exchange(true, std::memory_order_relaxed);
  double old = value_.load(std::memory_order_relaxed);
  double next = 0.0;
  do {
    if (second) {
      next = std::min(first, seen);
    } else {
      next = old == 0.0 ? seen : old + (std::min(seen, kMostAtOnce * old) - old) * weight;
    }
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
  if (at(Origin::ram).available) return {Origin::ram, Reason::in_memory};
  const Candidate &file = at(Origin::file), &peer = at(Origin::peer), &source = at(Origin::source);
  if (!file.available && !peer.available) return {Origin::source, Reason::only};
  Choice best{Origin::file, Reason::nearest};
  if (!file.available) {
    best.origin = Origin::peer;
  } else if (peer.available && file.seconds_per_byte > 0.0) {
    if (peer.seconds_per_byte == 0.0) {
      best = {Origin::peer, Reason::unmeasured};
    } else if (peer.seconds_per_byte < file.seconds_per_byte) {
      best = {Origin::peer, Reason::faster_peer};
    }
  }
  const double cost = at(best.origin).seconds_per_byte;
  const double advantage =
      best.origin == Origin::peer ? kSourceAdvantageOverPeers : kSourceAdvantage;
  if (source.available && source.seconds_per_byte > 0.0 && cost > 0.0 &&
      cost > advantage * source.seconds_per_byte) {
    return {Origin::source, Reason::faster_source};
  }
  return best;
}

}  // namespace nostall::stage
