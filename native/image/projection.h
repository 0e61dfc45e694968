// image/projection.h - the matrices of rotations, affine maps and perspective, as torchvision and
// Pillow compute them. Angles in degrees. Thread-safety: functions of their arguments.
#pragma once

#include "image/draw.h"

namespace nostall::image {

using Point = std::array<double, 2>;  // x, y

struct Affine {
  double angle = 0;  // clockwise
  Point translate{};
  double scale = 1;
  Point shear{};
};

// The warps of a canvas; `center` is the point that stays (but for translate).
Warp affine_warp(const Affine& affine, Point center);
Warp rotation_warp(double angle, Point center);  // counter-clockwise
// Moves the canvas's corners (0, 0), (width - 1, 0), ... clockwise to `corners`. False if no
// projection does that.
bool perspective_warp(int64_t width, int64_t height, const std::array<Point, 4>& corners,
                      Warp& warp);

}  // namespace nostall::image
