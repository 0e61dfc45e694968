// image/surface.h - pixels of a whole canvas that can be written, between two actions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "image/bitmap.h"

namespace nostall::image {

// 4 bytes a pixel, as a Bitmap's; rows follow each other without gaps.
struct Surface {
  uint8_t* pixels = nullptr;
  int64_t width = 0, height = 0;
  size_t stride() const noexcept { return static_cast<size_t>(width) * 4; }
  size_t bytes() const noexcept { return stride() * static_cast<size_t>(height); }
  uint8_t* row(int64_t y) const noexcept { return pixels + static_cast<size_t>(y) * stride(); }
  Bitmap bitmap() const noexcept { return {pixels, stride(), 0, 0, width, height, 0}; }
};

}  // namespace nostall::image
