// base/random.h - random numbers that every process and every release agrees on.
//
// Mt19937 is the generator of torch's CPU Generator (32-bit outputs, the same stream), needed for
// orders identical to torch's. Philox is counter-based (Philox4x32-10, Salmon et al., SC'11): any
// draw is a pure function of (key, counter), which is what augmentation keyed by
// (seed, epoch, sample) needs. Golden vectors: tests/native/base/base_test.cc.
// Thread-safety: values; one instance per thread.
#pragma once

#include <array>
#include <cstdint>

namespace nostall {

class Mt19937 {
 public:
  // Seeds as torch.Generator().manual_seed(seed) does: the low 32 bits.
  explicit Mt19937(uint64_t seed) noexcept;
  uint32_t operator()() noexcept {
    if (next_ == kWords) refill();
    uint32_t y = state_[next_++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
  }

 private:
  static constexpr uint32_t kWords = 624;
  void refill() noexcept;
  std::array<uint32_t, kWords> state_;
  uint32_t next_ = kWords;
};

// Ten rounds of Philox4x32 on one counter block.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key) noexcept;

// The seed of the draws of a sample that comes for the `occurrence`-th time, from 0, in one epoch:
// the first time has the job's own.
uint64_t seed_of_occurrence(uint64_t seed, uint32_t occurrence) noexcept;

// The stream of draws that belong to one (seed, epoch, sample).
class SampleRandom {
 public:
  SampleRandom(uint64_t seed, uint32_t epoch, uint64_t sample) noexcept
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        counter_{0, epoch, static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32)} {}

  uint32_t next() noexcept {
    if (used_ == 4) {
      block_ = philox4x32(counter_, key_);
      ++counter_[0];
      used_ = 0;
    }
    return block_[used_++];
  }
  // Draws so far.
  uint32_t taken() const noexcept { return 4 * counter_[0] - (4 - used_); }
  // Uniform in [0, 1), 24 bits.
  double uniform() noexcept { return (next() >> 8) * (1.0 / 16777216.0); }
  double uniform(double low, double high) noexcept { return low + (high - low) * uniform(); }
  // Uniform integer in [0, bound), bound > 0; bias below 2^-32.
  uint32_t below(uint32_t bound) noexcept {
    return static_cast<uint32_t>((uint64_t{next()} * bound) >> 32);
  }

 private:
  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 4> counter_;
  std::array<uint32_t, 4> block_{};
  uint32_t used_ = 4;
};

}  // namespace nostall
