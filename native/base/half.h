// base/half.h - IEEE 754 binary16. Thread-safety: pure.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace nostall {

// Rounded to nearest even.
inline uint16_t half_of(float value) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (!(magnitude < 65520.0f)) {
    return static_cast<uint16_t>(sign | (magnitude != magnitude ? 0x7e00u : 0x7c00u));
  }
  if (magnitude < 6.103515625e-5f) {  // subnormal: multiples of 2^-24
    const auto steps = static_cast<uint32_t>(std::nearbyint(magnitude * 16777216.0f));
    return static_cast<uint16_t>(sign | steps);
  }
  const auto m = std::bit_cast<uint32_t>(magnitude);
  return static_cast<uint16_t>(sign | ((m - 0x38000000u + 0xfffu + ((m >> 13) & 1u)) >> 13));
}

inline float float_of(uint16_t half) noexcept {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x400u) {  // subnormal: multiples of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
}

}  // namespace nostall
