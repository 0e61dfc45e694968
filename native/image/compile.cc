// Checks steps one by one and folds ToTensor and Normalize into one scale and offset a channel.
#include "image/compile.h"

#include <cmath>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::usage, what); }

void check_size(const char* step, uint32_t height, uint32_t width) {
  if (height == 0 || width == 0 || height > kMaxSide || width > kMaxSide) {
    usage(std::string(step) + " to " + std::to_string(height) + "x" + std::to_string(width) +
          ": sides must be between 1 and " + std::to_string(kMaxSide));
  }
}

void check_positive(const char* step, const char* what, const std::array<double, 2>& range) {
  if (!(range[0] > 0 && range[0] <= range[1] && std::isfinite(range[1]))) {
    usage(std::string(step) + " " + what + " (" + std::to_string(range[0]) + ", " +
          std::to_string(range[1]) + ") must be positive and ascending");
  }
}

void check_between(const std::string& what, double value, double low, double high) {
  if (!(value >= low && value <= high)) {
    usage(what + " = " + std::to_string(value) + ": must be between " + std::to_string(low) +
          " and " + std::to_string(high));
  }
}

void check_ascending(const std::string& what, double low, double high, double least, double most) {
  check_between(what, low, least, most);
  check_between(what, high, low, most);
}

void check_probability(const char* step, double p) {
  if (!(p >= 0 && p <= 1)) {
    usage(std::string(step) + " with p = " + std::to_string(p) + ": must be between 0 and 1");
  }
}

constexpr double kTurns = 36000;  // degrees
constexpr double kLargeFactor = 1e6;

class Compiler {
 public:
  // The size is known from the start where all samples have one.
  Compiler(Pipeline::Impl& made, const std::optional<Pixels>& pixels) : made_(made) {
    if (pixels) height_ = pixels->height, width_ = pixels->width;
  }
  bool fixed() const { return height_ != 0; }
  uint32_t height() const { return height_; }
  uint32_t width() const { return width_; }
  bool tensor() const { return tensor_; }

  void operator()(const Decode&) {
    if (!first_) usage("Decode must be the first step");
  }
  void operator()(const Drawn&) {}
  void operator()(const Resize& step) {
    before_tensor("Resize");
    check_size("Resize", step.height, step.width == 0 ? step.height : step.width);
    if (step.width == 0 && height_ != 0 && height_ == width_) {
      height_ = width_ = step.height;
    } else {
      height_ = step.width == 0 ? 0 : step.height;
      width_ = step.width;
    }
  }
  void operator()(const CenterCrop& step) { fix("CenterCrop", step.height, step.width); }
  void operator()(const RandomResizedCrop& step) {
    fix("RandomResizedCrop", step.height, step.width);
    check_positive("RandomResizedCrop", "scale", step.scale);
    check_positive("RandomResizedCrop", "ratio", step.ratio);
  }
  void operator()(const RandomHorizontalFlip& s) { chance("RandomHorizontalFlip", s.p); }
  void operator()(const RandomVerticalFlip& s) { chance("RandomVerticalFlip", s.p); }
  void operator()(const Pad& step) {
    before_tensor("Pad");
    check_padding("Pad", step.padding);
    if (height_ == 0) return;
    width_ += step.padding[0] + step.padding[2];
    height_ += step.padding[1] + step.padding[3];
    check_size("Pad", height_, width_);
  }
  void operator()(const RandomCrop& step) {
    check_padding("RandomCrop", step.padding);
    fix("RandomCrop", step.height, step.width);
  }
  void operator()(const RandomRotation& step) {
    before_tensor("RandomRotation");
    check_ascending("RandomRotation degrees", step.degrees[0], step.degrees[1], -kTurns, kTurns);
    check_center("RandomRotation", step.center);
    check_warp("RandomRotation", step.interpolation);
  }
  void operator()(const RandomAffine& step) {
    before_tensor("RandomAffine");
    check_ascending("RandomAffine degrees", step.degrees[0], step.degrees[1], -kTurns, kTurns);
    for (const double part : step.translate) check_between("RandomAffine translate", part, 0, 1);
    check_positive("RandomAffine", "scale", step.scale);
    for (size_t i = 0; i < 4; i += 2) {
      check_ascending("RandomAffine shear", step.shear[i], step.shear[i + 1], -89, 89);
    }
    check_center("RandomAffine", step.center);
    check_warp("RandomAffine", step.interpolation);
  }
  void operator()(const RandomPerspective& step) {
    chance("RandomPerspective", step.p);
    check_between("RandomPerspective distortion_scale", step.distortion_scale, 0, 1);
    check_warp("RandomPerspective", step.interpolation);
  }

  void operator()(const ColorJitter& step) {
    before_tensor("ColorJitter");
    for (const auto& range : {step.brightness, step.contrast, step.saturation}) {
      if (range) check_ascending("ColorJitter factor", (*range)[0], (*range)[1], 0, kLargeFactor);
    }
    if (step.hue) check_ascending("ColorJitter hue", (*step.hue)[0], (*step.hue)[1], -0.5, 0.5);
  }
  void operator()(const Grayscale&) { before_tensor("Grayscale"); }
  void operator()(const RandomGrayscale& s) { chance("RandomGrayscale", s.p); }
  void operator()(const GaussianBlur& step) {
    before_tensor("GaussianBlur");
    for (const uint32_t side : step.kernel) {
      if (side % 2 == 0 || side > kMaxKernel) {
        usage("GaussianBlur kernel_size " + std::to_string(side) + ": must be odd, 1 to " +
              std::to_string(kMaxKernel));
      }
    }
    check_positive("GaussianBlur", "sigma", step.sigma);
  }
  void operator()(const RandomSolarize& step) {
    chance("RandomSolarize", step.p);
    check_between("RandomSolarize threshold", step.threshold, 0, 256);
  }
  void operator()(const RandomPosterize& step) {
    chance("RandomPosterize", step.p);
    check_between("RandomPosterize bits", step.bits, 0, 8);
  }
  void operator()(const RandomInvert& s) { chance("RandomInvert", s.p); }
  void operator()(const RandomAutocontrast& s) { chance("RandomAutocontrast", s.p); }
  void operator()(const RandomEqualize& s) { chance("RandomEqualize", s.p); }
  void operator()(const RandomAdjustSharpness& step) {
    chance("RandomAdjustSharpness", step.p);
    check_between("RandomAdjustSharpness factor", step.factor, 0, kLargeFactor);
  }
  void operator()(const RandAugment& step) {
    before_tensor("RandAugment");
    check_between("RandAugment num_ops", step.num_ops, 0, 100);
    check_between("RandAugment num_magnitude_bins", step.num_magnitude_bins, 1, 1000);
    check_between("RandAugment magnitude", step.magnitude, 0, step.num_magnitude_bins - 1);
    check_warp("RandAugment", step.interpolation);
  }
  void operator()(const TrivialAugmentWide& step) {
    before_tensor("TrivialAugmentWide");
    check_between("TrivialAugmentWide num_magnitude_bins", step.num_magnitude_bins, 1, 1000);
    check_warp("TrivialAugmentWide", step.interpolation);
  }
  void operator()(const AutoAugment& step) {
    before_tensor("AutoAugment");
    check_warp("AutoAugment", step.interpolation);
  }

  void operator()(const ClampBoundingBoxes&) {}
  void operator()(const SanitizeBoundingBoxes& step) {
    check_between("SanitizeBoundingBoxes min_size", step.min_size, 0, kMaxSide);
    check_between("SanitizeBoundingBoxes min_area", step.min_area, 0, 1e12);
    made_.sanitizes = true;
  }

  void operator()(const ToTensor&) {
    if (tensor_) usage("ToTensor appears twice: keep the first");
    tensor_ = true;
    for (double& factor : scale_) factor = 1.0 / 255;
  }
  void operator()(const Normalize& step) {
    if (!tensor_) usage("Normalize needs ToTensor before it");
    for (size_t c = 0; c < 3; ++c) {
      const double std = step.std[c], mean = step.mean[c];
      if (!(std > 0 && std::isfinite(std) && std::isfinite(mean))) {
        usage("Normalize with mean " + std::to_string(mean) + ", std " + std::to_string(std) +
              ": both must be finite, std above zero");
      }
      scale_[c] /= std;
      offset_[c] = (offset_[c] - mean) / std;
      for (Affinity3& erased : made_.erased) {
        erased.scale[c] /= step.std[c];
        erased.offset[c] = (erased.offset[c] - step.mean[c]) / step.std[c];
      }
    }
  }
  void operator()(const RandomErasing& step) {
    if (!tensor_) usage("RandomErasing needs ToTensor before it");
    check_probability("RandomErasing", step.p);
    check_ascending("RandomErasing scale", step.scale[0], step.scale[1], 0, 1);
    check_positive("RandomErasing", "ratio", step.ratio);
    for (const float value : step.value) {
      if (!std::isfinite(value)) usage("RandomErasing value must be finite");
    }
    made_.erasing.push_back(step);
    made_.erased.emplace_back();
  }

  void next() { first_ = false; }
  void finish() {
    for (size_t c = 0; c < 3; ++c) {
      made_.finish.scale[c] = static_cast<float>(scale_[c]);
      made_.finish.offset[c] = static_cast<float>(offset_[c]);
    }
  }

 private:
  static constexpr uint32_t kMaxKernel = 501;

  void before_tensor(const char* step) const {
    if (tensor_) usage(std::string(step) + " must come before ToTensor");
  }
  void chance(const char* step, double p) const {
    before_tensor(step);
    check_probability(step, p);
  }
  void fix(const char* step, uint32_t h, uint32_t w) {
    before_tensor(step);
    check_size(step, h, w);
    height_ = h;
    width_ = w;
  }
  static void check_padding(const char* step, const std::array<uint32_t, 4>& padding) {
    for (const uint32_t side : padding) {
      if (side > kMaxSide) {
        usage(std::string(step) + " with a padding of " + std::to_string(side) +
              ": must be between 0 and " + std::to_string(kMaxSide));
      }
    }
  }
  static void check_center(const char* step, const std::optional<std::array<double, 2>>& center) {
    if (!center) return;
    for (const double at : *center) {
      check_between(std::string(step) + " center", at, -kLargeFactor, kLargeFactor);
    }
  }
  static void check_warp(const char* step, Interpolation interpolation) {
    if (interpolation == Interpolation::nearest_exact) {
      usage(std::string(step) + " has no nearest_exact: nearest is the same for it");
    }
  }

  Pipeline::Impl& made_;
  uint32_t height_ = 0, width_ = 0;  // 0 while the size depends on the image
  bool tensor_ = false, first_ = true;
  std::array<double, 3> scale_{1, 1, 1}, offset_{};
};

}  // namespace

Pipeline Pipeline::compile(std::span<const Step> steps, const Options& options) {
  auto impl = std::make_unique<Impl>();
  Compiler compiler(*impl, options.pixels);
  for (const Step& step : steps) {
    std::visit(compiler, step);
    compiler.next();
  }
  compiler.finish();
  if (!compiler.fixed()) {
    usage(
        "the transforms give images of different sizes, which cannot be batched: add a Resize "
        "to (height, width), a CenterCrop, a RandomCrop or a RandomResizedCrop");
  }
  impl->steps.assign(steps.begin(), steps.end());
  impl->max_pixels = options.max_pixels;
  impl->pixels = options.pixels;
  if (options.pixels) check_pixels(*options.pixels, options.max_pixels);
  const bool tensor = compiler.tensor();
  impl->output = {compiler.height(), compiler.width(),
                  options.type.value_or(tensor ? Type::float32 : Type::uint8),
                  options.layout.value_or(tensor ? Layout::chw : Layout::hwc)};
  if (tensor && impl->output.type == Type::uint8) {
    usage(
        "ToTensor gives floating-point values, which uint8 cannot hold: drop ToTensor and "
        "Normalize or ask for float16 or float32");
  }
  return Pipeline(std::move(impl));
}

}  // namespace nostall::image
