// image/draw.h - the steps of one sample, with everything random drawn: a list of plain actions.
//
// Draws of a step, in the order of steps, golden in tests/python/loader/test_augment.py:
//   RandomResizedCrop 22; RandomErasing 25; RandomPerspective 9; ColorJitter 7; RandomAffine 6;
//   AutoAugment 5; TrivialAugmentWide 3; RandomCrop 2; RandAugment 2 for each of num_ops;
//   1 for every other step whose name begins with Random and for GaussianBlur; as many as it says
//   for Drawn; none for the rest.
// Thread-safety: functions of their arguments.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "image/steps.h"

namespace nostall::image {

// Pixels; x to the right, y down.
struct Box {
  int64_t x = 0, y = 0, width = 0, height = 0;
};

// Geometry. Each takes a canvas and gives one, on which the next works.
struct Crop {
  Box box;  // of the canvas; what lies outside it is filled
  Fill fill;
};
struct Scale {
  int64_t width = 0, height = 0;
  Interpolation interpolation = Interpolation::bilinear;
  bool antialias = true;
};
struct Mirror {
  bool vertical = false;  // top and bottom change places, else left and right
};
struct Border {  // of the canvas's own pixels
  int64_t left = 0, top = 0, right = 0, bottom = 0;
  PadMode mode = PadMode::edge;
};
// x' = (a0 x + a1 y + a2) / (a6 x + a7 y + 1), y' = (a3 x + a4 y + a5) / (the same).
using Projection = std::array<double, 8>;
struct Warp {
  Projection to_source{};  // from the centres of the result's pixels
  Projection to_result{};  // of points
  Interpolation interpolation = Interpolation::nearest;
  Fill fill;
  bool affine() const noexcept { return to_source[6] == 0 && to_source[7] == 0; }
};

// Colour.
enum class Tone : uint8_t {
  brightness,  // amount: factor
  contrast,    // factor
  saturation,  // factor
  hue,         // turns, -0.5 to 0.5
  sharpness,   // factor
  solarize,    // threshold
  posterize,   // bits
  grayscale,   // the rest: none
  invert,
  autocontrast,
  equalize,
};
struct Color {
  Tone tone = Tone::brightness;
  double amount = 0;
};
struct Blur {
  std::array<uint32_t, 2> kernel{};  // width, height
  double sigma = 0;
};

// Of the finished values.
struct Erase {
  Box box;
  uint32_t step = 0;              // which RandomErasing, from 0
  std::array<uint32_t, 2> key{};  // of its noise
};

// Boxes.
struct Clamp {};
struct Sanitize {
  double min_size = 0, min_area = 0;
};

using Action = std::variant<Crop, Scale, Mirror, Border, Warp, Color, Blur, Erase, Clamp, Sanitize>;

struct Drawing {
  int64_t from_width = 0, from_height = 0;  // the canvas at the start
  int64_t width = 0, height = 0;            // and at the end
  std::vector<Action> actions;
};

// The actions for a canvas of `width` x `height`; an Error of kind corruption if a step cannot work
// on it (RandomCrop of a smaller image).
Result<Drawing> draw(const std::vector<Step>& steps, int64_t width, int64_t height,
                     SampleRandom random);

// How many draws the steps take of a sample's generator.
uint32_t draws_of(const std::vector<Step>& steps);

// An action's name and numbers, for tests and for people.
struct Description {
  std::string name;
  std::vector<double> values;
};
Description describe(const Action& action);

// torchvision's RandomResizedCrop.get_params: ten tries at a random area and ratio, then the
// largest central box of an allowed ratio.
Box random_box(const RandomResizedCrop& step, int64_t width, int64_t height, SampleRandom& random);

}  // namespace nostall::image
