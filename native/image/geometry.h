// image/geometry.h - what a list of steps does to coordinates, worked out before any pixel is read.
//
// A Stage is "take a box of the input, resize it, look at a window of the result". Crops move boxes
// and windows, flips are kept to the end, and only a second resize starts a second stage. Most
// pipelines are one stage, and its box tells the decoder which region survives.
// Units: pixels; x to the right, y down. Thread-safety: values.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "image/pipeline.h"

namespace nostall::image {

struct Box {
  int64_t x = 0, y = 0, width = 0, height = 0;
};

struct Stage {
  Box box;                        // of the stage's input
  int64_t width = 0, height = 0;  // what the box is resized to
  Box window;                     // of the resized image; what lies outside it is black
  bool resizes() const noexcept { return width != box.width || height != box.height; }
  bool padded() const noexcept {
    return window.x < 0 || window.y < 0 || window.x + window.width > width ||
           window.y + window.height > height;
  }
};

struct Geometry {
  std::vector<Stage> stages;  // at least one
  bool mirror_x = false, mirror_y = false;
};

// The geometry of one sample of `width` x `height` pixels. The number of draws of every step is
// fixed: 22 for RandomResizedCrop, 1 for a random flip, none for the others.
Geometry compose(const std::vector<Step>& steps, int64_t width, int64_t height,
                 SampleRandom& random);

// torchvision's RandomResizedCrop.get_params: ten tries at a random area and ratio, then the
// largest central box of an allowed ratio.
Box random_box(const RandomResizedCrop& step, int64_t width, int64_t height, SampleRandom& random);

}  // namespace nostall::image
