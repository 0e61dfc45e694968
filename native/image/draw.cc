// One step after the other turned into actions; each takes its draws first, then decides.
#include "image/draw.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "image/policies.h"
#include "image/projection.h"

namespace nostall::image {
namespace {

constexpr int kTries = 10;

int64_t below(uint32_t draw, int64_t bound) {
  return static_cast<int64_t>((uint64_t{draw} * static_cast<uint64_t>(bound)) >> 32);
}

class Drawer {
 public:
  Drawer(int64_t width, int64_t height, SampleRandom random) : random_(random) {
    drawing_.from_width = drawing_.width = width;
    drawing_.from_height = drawing_.height = height;
  }

  void operator()(const Decode&) {}
  void operator()(const Drawn& step) {
    for (uint32_t i = 0; i < step.draws; ++i) random_.next();
  }
  void operator()(const ToTensor&) {}
  void operator()(const Normalize&) {}

  void operator()(const RandomHorizontalFlip& step) {
    if (chance(step.p)) push(Mirror{false});
  }
  void operator()(const RandomVerticalFlip& step) {
    if (chance(step.p)) push(Mirror{true});
  }
  void operator()(const Resize& step) {
    int64_t w = step.width, h = step.height;
    if (step.width == 0) {
      // The longer edge is truncated, as torchvision does.
      const auto longer = [&](int64_t from, int64_t to) {
        return static_cast<int64_t>(static_cast<double>(step.height * from) /
                                    static_cast<double>(to));
      };
      const bool upright = width() <= height();
      w = upright ? int64_t{step.height} : longer(width(), height());
      h = upright ? longer(height(), width()) : int64_t{step.height};
    }
    scale(w, h, step.interpolation, step.antialias);
  }
  void operator()(const CenterCrop& step) {
    crop({offset(width(), step.width), offset(height(), step.height), step.width, step.height}, {});
  }
  void operator()(const RandomResizedCrop& step) {
    crop(random_box(step, width(), height(), random_), {});
    scale(step.width, step.height, step.interpolation, step.antialias);
  }
  void operator()(const Pad& step) {
    const auto [left, top, right, bottom] = step.padding;
    pad(left, top, right, bottom, step.mode, step.fill);
  }
  void operator()(const RandomCrop& step) {
    const uint32_t down = random_.next(), across = random_.next();
    int64_t left = step.padding[0], top = step.padding[1];
    int64_t right = step.padding[2], bottom = step.padding[3];
    const int64_t more_x = int64_t{step.width} - (width() + left + right);
    const int64_t more_y = int64_t{step.height} - (height() + top + bottom);
    if (step.pad_if_needed) {
      left += std::max<int64_t>(0, more_x), right += std::max<int64_t>(0, more_x);
      top += std::max<int64_t>(0, more_y), bottom += std::max<int64_t>(0, more_y);
    } else if (more_x > 0 || more_y > 0) {
      fail("RandomCrop to " + std::to_string(step.height) + "x" + std::to_string(step.width) +
           " of an image of " + std::to_string(height()) + "x" + std::to_string(width()) +
           ", padding aside: pass pad_if_needed=True, or a Resize before it");
      return;
    }
    // Where nothing is added or cut boxes stay as they are, torchvision's way.
    if (left + top + right + bottom > 0) pad(left, top, right, bottom, step.mode, step.fill);
    const int64_t free_x = width() - step.width, free_y = height() - step.height;
    if (free_x + free_y == 0) return;
    crop({below(across, free_x + 1), below(down, free_y + 1), step.width, step.height}, {});
  }
  void operator()(const RandomRotation& step) {
    Warp warp = rotation_warp(random_.uniform(step.degrees[0], step.degrees[1]),
                              step.center.value_or(middle()));
    warp.interpolation = step.interpolation;
    warp.fill = step.fill;
    push(warp);
  }
  void operator()(const RandomAffine& step) {
    Affine affine;
    affine.angle = random_.uniform(step.degrees[0], step.degrees[1]);
    for (size_t i = 0; i < 2; ++i) {
      const double most = step.translate[i] * static_cast<double>(i == 0 ? width() : height());
      affine.translate[i] = std::nearbyint(random_.uniform(-most, most));
    }
    affine.scale = random_.uniform(step.scale[0], step.scale[1]);
    affine.shear[0] = random_.uniform(step.shear[0], step.shear[1]);
    affine.shear[1] = random_.uniform(step.shear[2], step.shear[3]);
    Warp warp = affine_warp(affine, step.center.value_or(middle()));
    warp.interpolation = step.interpolation;
    warp.fill = step.fill;
    push(warp);
  }
  void operator()(const RandomPerspective& step) {
    const bool wanted = chance(step.p);
    const int64_t across = bound(step.distortion_scale, width());
    const int64_t down = bound(step.distortion_scale, height());
    std::array<Point, 4> corners;
    for (size_t i = 0; i < 4; ++i) {
      const int64_t x = below(random_.next(), across), y = below(random_.next(), down);
      const bool right = i == 1 || i == 2, lower = i >= 2;
      corners[i] = {static_cast<double>(right ? width() - across + x : x),
                    static_cast<double>(lower ? height() - down + y : y)};
    }
    Warp warp;
    if (!wanted || !perspective_warp(width(), height(), corners, warp)) return;
    warp.interpolation = step.interpolation;
    warp.fill = step.fill;
    push(warp);
  }
  void operator()(const ColorJitter& step) {
    std::array<uint8_t, 4> order{0, 1, 2, 3};
    for (uint32_t i = 3; i > 0; --i) std::swap(order[i], order[random_.below(i + 1)]);
    const std::optional<std::array<double, 2>> ranges[4] = {step.brightness, step.contrast,
                                                            step.saturation, step.hue};
    std::array<double, 4> amounts{};
    for (size_t i = 0; i < 4; ++i) {
      const double draw = random_.uniform();
      if (ranges[i]) amounts[i] = (*ranges[i])[0] + ((*ranges[i])[1] - (*ranges[i])[0]) * draw;
    }
    constexpr Tone kTones[4] = {Tone::brightness, Tone::contrast, Tone::saturation, Tone::hue};
    for (const uint8_t i : order) {
      if (ranges[i]) push(Color{kTones[i], amounts[i]});
    }
  }
  void operator()(const Grayscale&) { push(Color{Tone::grayscale, 0}); }
  void operator()(const RandomGrayscale& step) { maybe(step.p, Tone::grayscale, 0); }
  void operator()(const RandomSolarize& step) { maybe(step.p, Tone::solarize, step.threshold); }
  void operator()(const RandomPosterize& step) { maybe(step.p, Tone::posterize, step.bits); }
  void operator()(const RandomInvert& step) { maybe(step.p, Tone::invert, 0); }
  void operator()(const RandomAutocontrast& step) { maybe(step.p, Tone::autocontrast, 0); }
  void operator()(const RandomEqualize& step) { maybe(step.p, Tone::equalize, 0); }
  void operator()(const RandomAdjustSharpness& step) {
    maybe(step.p, Tone::sharpness, step.factor);
  }
  void operator()(const GaussianBlur& step) {
    const double sigma = random_.uniform(step.sigma[0], step.sigma[1]);
    if (step.kernel[0] / 2 >= width() || step.kernel[1] / 2 >= height()) {
      fail("GaussianBlur with a kernel of " + std::to_string(step.kernel[0]) + "x" +
           std::to_string(step.kernel[1]) + " of an image of " + std::to_string(width()) + "x" +
           std::to_string(height()) + " pixels: half the kernel must be smaller than the image");
      return;
    }
    push(Blur{step.kernel, sigma});
  }
  void operator()(const RandAugment& step) { draw_policy(step, random_, drawing_); }
  void operator()(const TrivialAugmentWide& step) { draw_policy(step, random_, drawing_); }
  void operator()(const AutoAugment& step) { draw_policy(step, random_, drawing_); }
  void operator()(const ClampBoundingBoxes&) { push(Clamp{}); }
  void operator()(const SanitizeBoundingBoxes& step) {
    push(Sanitize{step.min_size, step.min_area});
  }
  void operator()(const RandomErasing& step) {
    const uint32_t index = erasings_++;
    const bool wanted = chance(step.p);
    std::array<double, 2 * kTries> shape;
    for (double& draw : shape) draw = random_.uniform();
    const uint32_t down = random_.next(), across = random_.next();
    const std::array<uint32_t, 2> key{random_.next(), random_.next()};
    if (!wanted) return;
    const double area = static_cast<double>(width()) * static_cast<double>(height());
    const double low = std::log(step.ratio[0]), high = std::log(step.ratio[1]);
    for (int i = 0; i < kTries; ++i) {
      const double erased = area * (step.scale[0] + (step.scale[1] - step.scale[0]) * shape[2 * i]);
      const double ratio = std::exp(low + (high - low) * shape[2 * i + 1]);
      const auto h = static_cast<int64_t>(std::nearbyint(std::sqrt(erased * ratio)));
      const auto w = static_cast<int64_t>(std::nearbyint(std::sqrt(erased / ratio)));
      if (h >= height() || w >= width()) continue;
      push(
          Erase{{below(across, width() - w + 1), below(down, height() - h + 1), w, h}, index, key});
      return;
    }
  }

  uint32_t taken() const { return random_.taken(); }
  Result<Drawing> take() {
    if (error_) return *error_;
    return std::move(drawing_);
  }

 private:
  int64_t width() const { return drawing_.width; }
  int64_t height() const { return drawing_.height; }
  Point middle() const {
    return {static_cast<double>(width()) * 0.5, static_cast<double>(height()) * 0.5};
  }
  bool chance(double p) { return random_.uniform() < p; }
  void push(const Action& action) { drawing_.actions.push_back(action); }
  void maybe(double p, Tone tone, double amount) {
    if (chance(p)) push(Color{tone, amount});
  }
  void fail(const std::string& what) {
    if (!error_) error_ = Error(ErrorKind::corruption, what);
  }

  // How far a corner may move, and one more.
  static int64_t bound(double distortion, int64_t size) {
    return static_cast<int64_t>(distortion * static_cast<double>(size / 2)) + 1;
  }
  // Of a centre crop: Python's int(round((have - want) / 2.0)) inside, (want - have) // 2 of
  // padding outside.
  static int64_t offset(int64_t have, int64_t want) {
    if (want > have) return -((want - have) / 2);
    return static_cast<int64_t>(std::nearbyint(static_cast<double>(have - want) / 2));
  }

  // Also of the whole canvas: boxes are clamped to it.
  void crop(Box box, const Fill& fill) {
    push(Crop{box, fill});
    drawing_.width = box.width;
    drawing_.height = box.height;
  }
  void pad(int64_t left, int64_t top, int64_t right, int64_t bottom, PadMode mode,
           const Fill& fill) {
    const Box box{-left, -top, width() + left + right, height() + top + bottom};
    if (mode == PadMode::constant || left + top + right + bottom == 0) return crop(box, fill);
    const int64_t own = mode == PadMode::reflect ? 1 : 0;
    if (mode != PadMode::edge &&
        (std::max(left, right) > width() - own || std::max(top, bottom) > height() - own)) {
      fail("padding of " + std::to_string(std::max({left, top, right, bottom})) +
           " pixels with the mirrored image of " + std::to_string(height()) + "x" +
           std::to_string(width()) + " pixels: there are not as many");
      return;
    }
    push(Border{left, top, right, bottom, mode});
    drawing_.width = box.width;
    drawing_.height = box.height;
  }
  void scale(int64_t w, int64_t h, Interpolation interpolation, bool antialias) {
    if (w == width() && h == height()) return;
    push(Scale{w, h, interpolation, antialias});
    drawing_.width = w;
    drawing_.height = h;
  }

  SampleRandom random_;
  Drawing drawing_;
  std::optional<Error> error_;
  uint32_t erasings_ = 0;
};

constexpr const char* kToneNames[] = {"brightness", "contrast",     "saturation", "hue",
                                      "sharpness",  "solarize",     "posterize",  "grayscale",
                                      "invert",     "autocontrast", "equalize"};

struct Describer {
  using D = Description;
  static std::vector<double> numbers(std::initializer_list<int64_t> values) {
    return {values.begin(), values.end()};
  }
  D operator()(const Crop& a) const {
    return {"crop", numbers({a.box.x, a.box.y, a.box.width, a.box.height})};
  }
  D operator()(const Scale& a) const { return {"resize", numbers({a.width, a.height})}; }
  D operator()(const Mirror& a) const {
    return {a.vertical ? "vertical_flip" : "horizontal_flip", {}};
  }
  D operator()(const Border& a) const {
    return {"border", numbers({a.left, a.top, a.right, a.bottom})};
  }
  D operator()(const Warp& a) const { return {"warp", {a.to_source.begin(), a.to_source.end()}}; }
  D operator()(const Color& a) const {
    return {kToneNames[static_cast<size_t>(a.tone)], {a.amount}};
  }
  D operator()(const Blur& a) const { return {"gaussian_blur", {a.sigma}}; }
  D operator()(const Erase& a) const {
    return {"erase", numbers({a.box.x, a.box.y, a.box.width, a.box.height})};
  }
  D operator()(const Clamp&) const { return {"clamp_bounding_boxes", {}}; }
  D operator()(const Sanitize& a) const {
    return {"sanitize_bounding_boxes", {a.min_size, a.min_area}};
  }
};

}  // namespace

Box random_box(const RandomResizedCrop& step, int64_t width, int64_t height, SampleRandom& random) {
  std::array<double, 2 * kTries> shape;
  for (double& draw : shape) draw = random.uniform();
  const uint32_t down = random.next(), right = random.next();

  const double area = static_cast<double>(width) * static_cast<double>(height);
  const double low = std::log(step.ratio[0]), high = std::log(step.ratio[1]);
  for (int i = 0; i < kTries; ++i) {
    const double target = area * (step.scale[0] + (step.scale[1] - step.scale[0]) * shape[2 * i]);
    const double ratio = std::exp(low + (high - low) * shape[2 * i + 1]);
    const double w = std::nearbyint(std::sqrt(target * ratio));
    const double h = std::nearbyint(std::sqrt(target / ratio));
    if (w >= 1 && h >= 1 && w <= static_cast<double>(width) && h <= static_cast<double>(height)) {
      const auto iw = static_cast<int64_t>(w), ih = static_cast<int64_t>(h);
      return {below(right, width - iw + 1), below(down, height - ih + 1), iw, ih};
    }
  }
  int64_t w = width, h = height;
  const double ratio = static_cast<double>(width) / static_cast<double>(height);
  if (ratio < step.ratio[0]) {
    h = static_cast<int64_t>(std::nearbyint(static_cast<double>(w) / step.ratio[0]));
  } else if (ratio > step.ratio[1]) {
    w = static_cast<int64_t>(std::nearbyint(static_cast<double>(h) * step.ratio[1]));
  }
  w = std::clamp<int64_t>(w, 1, width);
  h = std::clamp<int64_t>(h, 1, height);
  return {(width - w) / 2, (height - h) / 2, w, h};
}

Result<Drawing> draw(const std::vector<Step>& steps, int64_t width, int64_t height,
                     SampleRandom random) {
  Drawer drawer(width, height, random);
  for (const Step& step : steps) std::visit(drawer, step);
  return drawer.take();
}

uint32_t draws_of(const std::vector<Step>& steps) {
  Drawer drawer(1, 1, SampleRandom(0, 0, 0));  // as many on every canvas
  for (const Step& step : steps) std::visit(drawer, step);
  return drawer.taken();
}

Description describe(const Action& action) { return std::visit(Describer{}, action); }

}  // namespace nostall::image
