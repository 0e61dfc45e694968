// stage/origin.h - where to fetch a sample from: the choice of [Böhringer 2020, eq. 3.5 to 3.7],
// with speeds measured while running instead of tables typed in.
//
// Thread-safety: choose() is pure; SpeedEstimate may be updated and read from any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace nostall::stage {

enum class Origin : uint8_t { ram = 0, file = 1, peer = 2, source = 3 };
inline constexpr size_t kOrigins = 4;

// Running estimate of what one origin delivers to one reader, seconds per byte: r_j(p_j)/p_j for a
// tier, min(b_c, r_j(p_j)/p_j) for a peer, min(b_fs, t(gamma)/gamma) for the source. The first
// measurement says nothing by itself, for this process may not have run meanwhile: the estimate begins
// with the faster one of two. Each later one has a weight of 1/16, and more the older the last one is:
// after kMemoryNs it counts alone.
class SpeedEstimate {
 public:
  void record(uint64_t bytes, int64_t nanoseconds) noexcept;
  // True at most once every `nanoseconds` in which nothing was recorded. Then a slow origin is
  // tried again, for it may have become faster.
  bool stale(int64_t nanoseconds) noexcept;
  // Sets the estimate to use until there are two measurements.
  void expect(double seconds_per_byte) noexcept { value_.store(seconds_per_byte); }
  // 0 while it is not known.
  double seconds_per_byte() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kMemoryNs = 2'000'000'000;
  std::atomic<double> value_{0.0}, first_{0.0};
  std::atomic<bool> known_{false};    // by two measurements
  std::atomic<int64_t> recorded_{0};  // time of the last measurement
  std::atomic<int64_t> tried_{0};     // and of the last time that one was due
};

// What a rank has measured: of each tier of its node and of each node by itself, for they differ.
struct Speeds {
  static constexpr size_t kTiers = 8;
  explicit Speeds(size_t count) : nodes(count) {}
  std::array<SpeedEstimate, kTiers> tiers;
  std::vector<SpeedEstimate> nodes;
  SpeedEstimate source;
};

struct Candidate {
  bool available = false;
  double seconds_per_byte = 0.0;  // 0: not known yet
};

// Why an origin was chosen.
enum class Reason : uint8_t {
  only,         // no other one has the sample
  in_memory,    // nothing need be read
  nearest,      // of those of which nothing says that they are slower
  unmeasured,   // another node, of which no speed is known yet
  faster_peer,  // another node is faster than the tier that has the sample here
  faster_source,
  again,  // a slower one is tried, for it may have become faster
};
inline constexpr size_t kReasons = 7;

struct Choice {
  Origin origin = Origin::source;
  Reason reason = Reason::only;
};

// A byte read from the source is taken from the bandwidth of every other node. So the source is
// preferred to a copy in the tiers only if it is this many times faster than this node's files, or
// than its peers: with few requests at a time peers look slower than they are.
inline constexpr double kSourceAdvantage = 2.0;
inline constexpr double kSourceAdvantageOverPeers = 8.0;

// The origin with the least expected time among the available ones (indexed by Origin). A tier of
// this node whose speed is not known is trusted, another node is tried once that of the tier is known,
// and a source is not.
Choice choose(const std::array<Candidate, kOrigins>& candidates) noexcept;

// Whether to push a sample that was read from the source to its owner: not if the network is so
// slow that the owner would read it faster itself.
bool worth_pushing(double peer_seconds_per_byte, double source_seconds_per_byte) noexcept;

}  // namespace nostall::stage
