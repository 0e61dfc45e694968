// image/color_kernels.h - the loops over pixels that colour changes spend their time in.
//
// Each exists for AVX2 and without; both give the same bits. Thread-safety: functions of their
// arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace nostall::image {

// Image.blend of one value: single precision, cut off.
inline uint8_t blend(int from, int to, float factor) noexcept {
  const float value = static_cast<float>(from) + factor * static_cast<float>(to - from);
  const float low = value > 0 ? value : 0;
  return static_cast<uint8_t>(low < 255 ? low : 255);
}

// Pillow's convert("L").
inline int grey(int r, int g, int b) noexcept {
  return (r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16;
}

// Of `count` 4-byte pixels: each channel blended with the pixel's grey. Factor 0 makes grey.
void saturate(uint8_t* pixels, size_t count, float factor) noexcept;
// The sum of all greys.
uint64_t sum_grey(const uint8_t* pixels, size_t count) noexcept;
// One row, blended with the mean of 3 x 3 neighbours, the middle five times; `count` bytes from the
// second pixel on.
void sharpen_row(const uint8_t* above, const uint8_t* row, const uint8_t* below, uint8_t* out,
                 size_t count, float factor) noexcept;

// sums[i] += weight * (a[i] + b[i]).
void add_weighted(int32_t* sums, const uint8_t* a, const uint8_t* b, int32_t weight,
                  size_t count) noexcept;
void add_weighted(int32_t* sums, const uint16_t* a, const uint16_t* b, int32_t weight,
                  size_t count) noexcept;

}  // namespace nostall::image
