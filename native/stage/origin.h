// stage/origin.h - where to fetch a sample from: the choice of equations 3.5 to 3.7 (seed
// clairvoyant-prefetching), with speeds measured while running instead of tables typed in.
//
// Thread-safety: choose() is pure; SpeedEstimate may be updated and read from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace nostall::stage {

enum class Origin : uint8_t { ram = 0, file = 1, source = 2 };
inline constexpr size_t kOrigins = 3;

// Running estimate of what one origin delivers to one reader, seconds per byte: r_j(p_j)/p_j for a
// tier, min(b_fs, t(gamma)/gamma) for the source. Follows changes with a weight of 1/16 per sample.
class SpeedEstimate {
 public:
  void record(uint64_t bytes, int64_t nanoseconds) noexcept;
  // Seconds a byte; 0 while nothing was measured.
  double seconds_per_byte() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_{0.0};
};

struct Candidate {
  bool available = false;
  double seconds_per_byte = 0.0;  // 0: not measured yet
};

struct Choice {
  Origin origin = Origin::source;
  std::string_view reason;
};

// A byte read from the source is a byte taken from every other node, so a local copy is left only
// for a source that is this many times faster.
inline constexpr double kSourceAdvantage = 2.0;

// The origin with the least expected time among the available ones (indexed by Origin). An origin
// that was never measured is trusted in the order ram, file, source.
Choice choose(const std::array<Candidate, kOrigins>& candidates) noexcept;

}  // namespace nostall::stage
