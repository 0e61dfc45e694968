#include "stage/origin.h"

namespace nostall::stage {

void SpeedEstimate::record(uint64_t bytes, int64_t nanoseconds) noexcept {
  if (bytes == 0 || nanoseconds <= 0) return;
  const double seen = static_cast<double>(nanoseconds) * 1e-9 / static_cast<double>(bytes);
  double old = value_.load(std::memory_order_relaxed);
  double next = 0.0;
  do {
    next = old == 0.0 ? seen : old + (seen - old) / 16.0;
  } while (!value_.compare_exchange_weak(old, next, std::memory_order_relaxed));
}

Choice choose(const std::array<Candidate, kOrigins>& candidates) noexcept {
  const Candidate& ram = candidates[static_cast<size_t>(Origin::ram)];
  const Candidate& file = candidates[static_cast<size_t>(Origin::file)];
  const Candidate& source = candidates[static_cast<size_t>(Origin::source)];
  if (ram.available) return {Origin::ram, "in the RAM tier"};
  if (!file.available) return {Origin::source, "in no tier"};
  if (!source.available || source.seconds_per_byte == 0.0 || file.seconds_per_byte == 0.0) {
    return {Origin::file, "in the file tier"};
  }
  if (file.seconds_per_byte > kSourceAdvantage * source.seconds_per_byte) {
    return {Origin::source, "the source is faster than the file tier"};
  }
  return {Origin::file, "the file tier is the faster one"};
}

}  // namespace nostall::stage
