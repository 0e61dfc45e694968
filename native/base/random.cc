// MT19937 and Philox4x32-10. Both must give the published streams bit for bit: orders and draws of
// all releases depend on them.
#include "base/random.h"

namespace nostall {

Mt19937::Mt19937(uint64_t seed) noexcept {
  state_[0] = static_cast<uint32_t>(seed);
  for (uint32_t i = 1; i < kWords; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
}

void Mt19937::refill() noexcept {
  constexpr uint32_t kShift = 397;
  const auto twist = [](uint32_t u, uint32_t v) {
    return (((u & 0x80000000u) | (v & 0x7fffffffu)) >> 1) ^ ((v & 1u) ? 0x9908b0dfu : 0u);
  };
  for (uint32_t i = 0; i < kWords - kShift; ++i) {
    state_[i] = state_[i + kShift] ^ twist(state_[i], state_[i + 1]);
  }
  for (uint32_t i = kWords - kShift; i < kWords - 1; ++i) {
    state_[i] = state_[i + kShift - kWords] ^ twist(state_[i], state_[i + 1]);
  }
  state_[kWords - 1] = state_[kShift - 1] ^ twist(state_[kWords - 1], state_[0]);
  next_ = 0;
}

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key) noexcept {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

uint64_t seed_of_occurrence(uint64_t seed, uint32_t occurrence) noexcept {
  if (occurrence == 0) return seed;
  // No sample has a number this large, so no other code makes these draws.
  constexpr uint32_t kStream = 0x6f636375;
  const auto words = philox4x32({occurrence, 0, 0, kStream},
                                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return uint64_t{words[1]} << 32 | words[0];
}

}  // namespace nostall
