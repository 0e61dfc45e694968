// plan/permutation.h - a keyed pseudo-random permutation with an inverse, in O(1) memory.
//
// A balanced Feistel network of kRounds rounds over the smallest even number of bits that covers n,
// with cycle walking: values outside [0, n) are permuted again. The round function is a
// multiply-mix keyed from Philox(seed, epoch). Version 1 of order "keyed" (docs/formats/order.md).
// Thread-safety: immutable. Cost: at most four walks in expectation, about 10 ns each.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "base/random.h"

namespace nostall::plan {

class KeyedPermutation {
 public:
  KeyedPermutation(uint64_t n, uint64_t seed, uint32_t epoch) noexcept : n_(n) {
    const int bits = n <= 2 ? 2 : std::bit_width(n - 1);
    half_ = static_cast<uint32_t>((bits + 1) / 2);
    mask_ = (half_ == 32) ? 0xffffffffu : (1u << half_) - 1;
    for (uint32_t i = 0; i < kRounds / 4; ++i) {
      const auto block =
          philox4x32({i, epoch, 0x4b657965u, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
      for (uint32_t j = 0; j < 4; ++j) keys_[4 * i + j] = block[j];
    }
  }

  uint64_t size() const noexcept { return n_; }

  // The sample at `position`, below n.
  uint64_t operator()(uint64_t position) const noexcept {
    do {
      position = encrypt(position);
    } while (position >= n_);
    return position;
  }

  // The position of `sample`.
  uint64_t inverse(uint64_t sample) const noexcept {
    do {
      sample = decrypt(sample);
    } while (sample >= n_);
    return sample;
  }

 private:
  static constexpr uint32_t kRounds = 8;

  static uint32_t mix(uint32_t x, uint32_t key) noexcept {
    x = (x ^ key) * 0x85ebca6bu;
    x ^= x >> 15;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 13);
  }
  uint64_t encrypt(uint64_t value) const noexcept {
    auto left = static_cast<uint32_t>(value >> half_), right = static_cast<uint32_t>(value) & mask_;
    for (uint32_t round = 0; round < kRounds; ++round) {
      const uint32_t next = left ^ (mix(right, keys_[round]) & mask_);
      left = right;
      right = next;
    }
    return (uint64_t{left} << half_) | right;
  }
  uint64_t decrypt(uint64_t value) const noexcept {
    auto left = static_cast<uint32_t>(value >> half_), right = static_cast<uint32_t>(value) & mask_;
    for (uint32_t round = kRounds; round-- > 0;) {
      const uint32_t previous = right ^ (mix(left, keys_[round]) & mask_);
      right = left;
      left = previous;
    }
    return (uint64_t{left} << half_) | right;
  }

  uint64_t n_;
  uint32_t half_ = 0, mask_ = 0;
  std::array<uint32_t, kRounds> keys_{};
};

}  // namespace nostall::plan
