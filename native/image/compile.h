// image/compile.h - a list of steps, checked: what every pipeline of it has in common.
// Thread-safety: immutable.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "image/pipeline.h"

namespace nostall::image {

struct Affinity3 {
  std::array<float, 3> scale{1, 1, 1}, offset{};  // of each channel
};

struct Pipeline::Impl {
  std::vector<Step> steps;
  Output output;
  uint64_t max_pixels = 0;
  std::optional<Pixels> pixels;
  Affinity3 finish;                    // from levels 0-255 to values
  std::vector<RandomErasing> erasing;  // in their order, with what Normalize does behind each:
  std::vector<Affinity3> erased;
  bool sanitizes = false;
};

}  // namespace nostall::image
