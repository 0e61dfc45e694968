// image/labels.h - images whose pixels are numbers, not colours: the masks of segmentation.
//
// Total: any bytes give labels or an Error of kind corruption. Thread-safety: one Buffer per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"
#include "image/bitmap.h"

namespace nostall::image {

// One number per pixel, rows from the top: of `wide` images uint16_t in the order of the machine,
// else uint8_t.
struct Labels {
  int64_t width = 0, height = 0;
  bool wide = false;
  const std::byte* values = nullptr;
};

// A PNG image of one channel: its values exactly as they are stored (grey of 1 to 16 bits without
// any scaling, or the indices of a palette). Colours are refused, for they are not numbers.
Result<Labels> decode_labels(std::span<const std::byte> encoded, uint64_t max_pixels,
                             Buffer& buffer);

}  // namespace nostall::image
