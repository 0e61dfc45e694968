// image/geometry.h - a run of crops, resizes and flips, folded before any pixel is read.
//
// A Stage is "take a box of the input, resize it, look at a window of the result". Crops move boxes
// and windows, flips are kept to the end, and only a second resize starts a second stage. Most
// pipelines are one stage, and its box is the region that must be decoded.
// Units: pixels; x to the right, y down. Thread-safety: values.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "image/draw.h"

namespace nostall::image {

struct Stage {
  Box box;                        // of the stage's input
  int64_t width = 0, height = 0;  // what the box is resized to
  Box window;                     // of the resized image; what lies outside it is `fill`
  Interpolation interpolation = Interpolation::bilinear;
  bool antialias = true;
  std::array<uint8_t, 3> fill{};
  bool resizes() const noexcept { return width != box.width || height != box.height; }
  bool padded() const noexcept {
    return window.x < 0 || window.y < 0 || window.x + window.width > width ||
           window.y + window.height > height;
  }
};

struct Geometry {
  std::vector<Stage> stages;  // at least one
  bool mirror_x = false, mirror_y = false;
  int64_t width() const noexcept { return stages.back().window.width; }
  int64_t height() const noexcept { return stages.back().window.height; }
  // Whether it gives its input.
  bool idle() const noexcept;
};

// Folds actions from `next` on, for a canvas of `width` x `height`, up to the first that changes
// pixels in another way; `next` becomes its place. Actions on boxes or on finished values alone
// are passed over.
Geometry fold(const std::vector<Action>& actions, size_t& next, int64_t width, int64_t height);

}  // namespace nostall::image
