// image/warp.h - rotations, affine maps and perspective of a canvas, with Pillow's arithmetic.
//
// Nearest results are Pillow's pixel for pixel, of images and masks; bilinear and bicubic ones
// differ by at most one level. Thread-safety: functions of their arguments.
#pragma once

#include "image/draw.h"
#include "image/surface.h"

namespace nostall::image {

// `from` to `to`, of the same size, in other memory.
void warp_pixels(const Warp& warp, const Surface& from, const Surface& to);
// The same for a mask of `width` x `height` values, nearest whatever the warp says.
void warp_values(const Warp& warp, const uint16_t* from, uint16_t* to, int64_t width,
                 int64_t height);

}  // namespace nostall::image
