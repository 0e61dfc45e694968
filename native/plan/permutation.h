// plan/permutation.h - a keyed pseudo-random permutation with an inverse, in O(1) memory.
//
// A Feistel network of kRounds rounds over pairs (l, r) with l < a and r < b, where a * b is n or
// little more: rounds add a keyed hash of one half to the other, modulo its bound. What falls
// outside [0, n) is permuted again (cycle walking), which is rare as a * b - n < b. Version 1 of
// the order "keyed" (docs/formats/order.md). Thread-safety: immutable. Cost: about 20 ns a look-up
// either way.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <span>

#include "base/random.h"

namespace nostall::plan {

class KeyedPermutation {
 public:
  // 1 <= n < 2^62.
  KeyedPermutation(uint64_t n, uint64_t seed, uint32_t epoch) noexcept : n_(n) {
    b_ = static_cast<uint32_t>(std::sqrt(static_cast<double>(n)));
    if (b_ == 0) b_ = 1;
    a_ = static_cast<uint32_t>((n + b_ - 1) / b_);
    for (uint32_t i = 0; i < kRounds / 4; ++i) {
      const auto block = philox4x32({i, epoch, kStream, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
      for (uint32_t j = 0; j < 4; ++j) keys_[4 * i + j] = block[j];
    }
  }

  uint64_t size() const noexcept { return n_; }

  // The sample at `position`, below n.
  uint64_t operator()(uint64_t position) const noexcept {
    do {
      position = forward(position);
    } while (position >= n_);
    return position;
  }

  // The samples at positions first, first + 1, ..., all below n; n below kFillBelow. The same values,
  // several at a time: about 2 ns each.
  void fill(std::span<uint32_t> out, uint64_t first = 0) const noexcept;
  // What it computes with here: "AVX-512", "AVX2" or "portable".
  static const char* kernel() noexcept;
  static constexpr uint64_t kFillBelow = uint64_t{1} << 31;

  // The position of `sample`.
  uint64_t inverse(uint64_t sample) const noexcept {
    do {
      sample = backward(sample);
    } while (sample >= n_);
    return sample;
  }

 private:
  static constexpr uint32_t kRounds = 8;
  static constexpr uint32_t kStream = 0x4b657965;  // keeps these draws apart from all others

  // A hash of x, scaled to [0, bound).
  static uint32_t scaled(uint32_t x, uint32_t key, uint32_t bound) noexcept {
    x = (x ^ key) * 0x85ebca6bu;
    x ^= x >> 15;
    x *= 0xc2b2ae35u;
    x ^= x >> 13;
    return static_cast<uint32_t>((uint64_t{x} * bound) >> 32);
  }
  uint64_t forward(uint64_t value) const noexcept {
    auto l = static_cast<uint32_t>(value / b_), r = static_cast<uint32_t>(value % b_);
    for (uint32_t round = 0; round < kRounds; round += 2) {
      const uint64_t sl = uint64_t{l} + scaled(r, keys_[round], a_);
      l = static_cast<uint32_t>(sl >= a_ ? sl - a_ : sl);
      const uint64_t sr = uint64_t{r} + scaled(l, keys_[round + 1], b_);
      r = static_cast<uint32_t>(sr >= b_ ? sr - b_ : sr);
    }
    return uint64_t{l} * b_ + r;
  }
  uint64_t backward(uint64_t value) const noexcept {
    auto l = static_cast<uint32_t>(value / b_), r = static_cast<uint32_t>(value % b_);
    for (uint32_t round = kRounds; round > 0; round -= 2) {
      const uint32_t dr = scaled(l, keys_[round - 1], b_);
      r = r >= dr ? r - dr : r + (b_ - dr);
      const uint32_t dl = scaled(r, keys_[round - 2], a_);
      l = l >= dl ? l - dl : l + (a_ - dl);
    }
    return uint64_t{l} * b_ + r;
  }

  uint64_t n_;
  uint32_t a_ = 1, b_ = 1;
  std::array<uint32_t, kRounds> keys_{};
};

}  // namespace nostall::plan
