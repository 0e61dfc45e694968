// image/steps.h - the steps of a pipeline, named and parametrised as in torchvision.transforms.v2.
//
// Sizes and paddings are in pixels, angles in degrees, factors have no unit: 1 leaves the image as
// it is. Every step takes a fixed number of draws from the sample's generator, whatever it draws,
// so that a step's result does not depend on what the steps before it did. The numbers are part of
// the order of draws, which no release changes: see draw.h. Thread-safety: values.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>

namespace nostall::image {

// How pixels between pixels are found. nearest is torch's (the pixel left of and above the place),
// nearest_exact torch's and Pillow's (the pixel that the place lies in).
enum class Interpolation : uint8_t { bilinear, bicubic, nearest, nearest_exact };
enum class PadMode : uint8_t { constant, edge, reflect, symmetric };

// What a place without a pixel gets: in images, and in masks.
struct Fill {
  std::array<uint8_t, 3> rgb{};
  uint16_t mask = 0;
  bool operator==(const Fill&) const = default;
};

struct Decode {};  // to RGB; implied at the start when absent
// Steps that ran elsewhere took so many draws: those behind it draw as if they had run here.
struct Drawn {
  uint32_t draws = 0;
};

// Geometry: images, masks, boxes and keypoints of a sample alike.
struct Resize {
  uint32_t height = 0, width = 0;  // width 0: the shorter edge becomes `height`, aspect kept
  Interpolation interpolation = Interpolation::bilinear;
  bool antialias = true;  // of bilinear and bicubic
};
struct CenterCrop {
  uint32_t height = 0, width = 0;
};
struct RandomResizedCrop {
  uint32_t height = 0, width = 0;
  std::array<double, 2> scale{0.08, 1.0};
  std::array<double, 2> ratio{3.0 / 4.0, 4.0 / 3.0};
  Interpolation interpolation = Interpolation::bilinear;
  bool antialias = true;
};
struct RandomHorizontalFlip {
  double p = 0.5;
};
struct RandomVerticalFlip {
  double p = 0.5;
};
struct Pad {
  std::array<uint32_t, 4> padding{};  // left, top, right, bottom
  PadMode mode = PadMode::constant;
  Fill fill;
};
struct RandomCrop {
  uint32_t height = 0, width = 0;
  std::array<uint32_t, 4> padding{};
  bool pad_if_needed = false;  // else a smaller image is an error
  PadMode mode = PadMode::constant;
  Fill fill;
};
struct RandomRotation {
  std::array<double, 2> degrees{};  // counter-clockwise
  Interpolation interpolation = Interpolation::nearest;
  std::optional<std::array<double, 2>> center;  // x, y; absent: of the image
  Fill fill;
};
struct RandomAffine {
  std::array<double, 2> degrees{};    // clockwise
  std::array<double, 2> translate{};  // largest, as parts of width and height
  std::array<double, 2> scale{1, 1};
  std::array<double, 4> shear{};  // lowest and highest along x, then along y
  Interpolation interpolation = Interpolation::nearest;
  std::optional<std::array<double, 2>> center;
  Fill fill;
};
struct RandomPerspective {
  double distortion_scale = 0.5, p = 0.5;
  Interpolation interpolation = Interpolation::bilinear;
  Fill fill;
};

// Colour: images alone.
struct ColorJitter {
  // Lowest and highest factor, of hue the shift in turns of the colour circle.
  std::optional<std::array<double, 2>> brightness, contrast, saturation, hue;
};
struct Grayscale {};
struct RandomGrayscale {
  double p = 0.1;
};
struct GaussianBlur {
  std::array<uint32_t, 2> kernel{};  // width, height; odd
  std::array<double, 2> sigma{0.1, 2.0};
};
struct RandomSolarize {
  double threshold = 128, p = 0.5;
};
struct RandomPosterize {
  uint32_t bits = 8;
  double p = 0.5;
};
struct RandomInvert {
  double p = 0.5;
};
struct RandomAutocontrast {
  double p = 0.5;
};
struct RandomEqualize {
  double p = 0.5;
};
struct RandomAdjustSharpness {
  double factor = 1, p = 0.5;
};

// Policies: their geometry moves masks, boxes and keypoints too.
struct RandAugment {
  uint32_t num_ops = 2, magnitude = 9, num_magnitude_bins = 31;
  Interpolation interpolation = Interpolation::nearest;
  Fill fill;
};
struct TrivialAugmentWide {
  uint32_t num_magnitude_bins = 31;
  Interpolation interpolation = Interpolation::nearest;
  Fill fill;
};
enum class Policy : uint8_t { imagenet, cifar10, svhn };
struct AutoAugment {
  Policy policy = Policy::imagenet;
  Interpolation interpolation = Interpolation::nearest;
  Fill fill;
};

// Boxes alone.
struct ClampBoundingBoxes {};  // to the image
// Takes out boxes whose sides or area, in pixels, are smaller, and those that are not inside the
// image; with min_size above 0 also degenerate and NaN ones.
struct SanitizeBoundingBoxes {
  double min_size = 1, min_area = 1;
};

// Values.
struct ToTensor {};  // to float in [0, 1], channels first
struct Normalize {
  std::array<float, 3> mean{}, std{1, 1, 1};
};
struct RandomErasing {  // behind ToTensor; images alone
  double p = 0.5;
  std::array<double, 2> scale{0.02, 0.33}, ratio{0.3, 3.3};
  std::array<float, 3> value{};
  bool noise = false;  // normal noise for every value instead of `value`
};

using Step =
    std::variant<Decode, Drawn, Resize, CenterCrop, RandomResizedCrop, RandomHorizontalFlip,
                 RandomVerticalFlip, Pad, RandomCrop, RandomRotation, RandomAffine,
                 RandomPerspective, ColorJitter, Grayscale, RandomGrayscale, GaussianBlur,
                 RandomSolarize, RandomPosterize, RandomInvert, RandomAutocontrast, RandomEqualize,
                 RandomAdjustSharpness, RandAugment, TrivialAugmentWide, AutoAugment,
                 ClampBoundingBoxes, SanitizeBoundingBoxes, ToTensor, Normalize, RandomErasing>;

}  // namespace nostall::image
