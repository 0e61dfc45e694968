// image/pixels.h - samples that are pixels already: uint8, in a layout that the source states.
//
// Total: any bytes give a bitmap or an Error of kind corruption. Thread-safety: pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "image/bitmap.h"

namespace nostall::image {

struct Pixels {
  uint32_t height = 0, width = 0;
  uint32_t channels = 3;        // 1 (grey, taken for all three) or 3
  bool channels_first = false;  // (channels, height, width) instead of (height, width, channels)
  bool bgr = false;             // blue first, as OpenCV and Caffe have it
};

// Throws Error(usage) if no image can be so.
void check_pixels(const Pixels& pixels, uint64_t max_pixels);

// The whole image, for the steps that follow a decoder; O(height * width).
Result<Bitmap> unpack_pixels(std::span<const std::byte> sample, const Pixels& pixels,
                             Buffer& buffer);

}  // namespace nostall::image
